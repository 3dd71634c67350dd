"""JSON as objects of dataclasses and structs: an error names the place of a wrong, missing or unknown field."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from moeflow.core.truncated_repr import truncated
from moeflow.core.untrusted import UnreadableError
from moeflow.kernels.on_demand import on_demand

with on_demand(__name__):
    from moeflow.core import near_names

Made = TypeVar("Made")


def convert(raw: Any, kind: type[Made]) -> Made:
    """Return a parsed JSON value as an object of `kind`.

    Raises: UnreadableError if a field is missing, unknown, of the wrong type or out of range.
    """
    try:
        made = msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise UnreadableError(truncated(str(error), longest=400)) from None
    _check_known(raw, msgspec.to_builtins(made), "$")
    return made


def _check_known(raw: Any, made: Any, place: str) -> None:
    """Raise UnreadableError if `raw` has a field that `made` lacks."""
    if isinstance(raw, list) and isinstance(made, list | tuple):
        for index, (one, other) in enumerate(zip(raw, made, strict=True)):
            _check_known(one, other, f"{place}[{index}]")
    elif isinstance(raw, dict) and isinstance(made, dict):
        for key, value in raw.items():
            if key not in made:
                hint = near_names.did_you_mean(key, made, f"known are {', '.join(sorted(made))}")
                raise UnreadableError(f"Unknown field at `{truncated(f'{place}.{key}')}` ({hint})")
            _check_known(value, made[key], f"{place}.{key}")
