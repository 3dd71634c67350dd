"""Settings as a command that serves a model with them. Names no file: it is shown to clients."""

from __future__ import annotations

import shlex
from typing import Any, Final

from moeflow.core.units import MIB
from moeflow.settings.settings import Settings, options

_FILES: Final = ("existing file", "new file", "folder")


def serve_command(settings: Settings, model: str) -> str:
    """Return the command that serves a model with all settings that are not at their defaults.

    Settings that name files are left out. `model` is its name, without a folder; empty: the built-in one.
    """
    defaults = Settings()
    given = [
        option_text(name, getattr(settings, name))
        for name, option in options().items()
        if option.kind not in _FILES and getattr(settings, name) != getattr(defaults, name)
    ]
    return " ".join(["moeflow serve", *([shlex.quote(model)] if model else []), *given])


def option_text(name: str, value: Any) -> str:
    """Return a setting as the command line has it: "--quantize int8"."""
    option = options()[name]
    on, _, off = option.flag.partition("/")
    if isinstance(value, bool):
        return on if value else off
    if isinstance(value, tuple):
        return " ".join(f"{on} {shlex.quote(str(each))}" for each in value)
    if option.kind == "bytes":
        return f"{on} {value // MIB}MiB" if value % MIB == 0 else f"{on} {value}"
    return f"{on} {shlex.quote(str(value))}"
