"""Checks that the packages of an optional extra are installed, before a feature needs them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable

from moeflow.core.errors import ConfigError


def require_extra(extra: str, modules: Iterable[str], feature: str) -> None:
    """Return if these modules can be imported. Raises: ConfigError with the command that installs them."""
    if not all(map(_is_installed, modules)):
        raise ConfigError(f"{feature}: run `pip install 'moeflow[{extra}]'`")


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a package around it
        return False
