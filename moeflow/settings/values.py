"""Settings as people write them in Python, or as they would on the command line: read into what the engine takes.

A number may be text, a size "64MiB", a folder text, a format torch's own. What cannot be meant is a ConfigError.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from moeflow.core.errors import ConfigError
from moeflow.core.truncated_repr import truncated_repr
from moeflow.core.units import parse_bytes

_FLAGS = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)


def read_settings(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values for the fields of a dataclass, each of its field's type.

    A field that ends in `_bytes` is a size. Raises: ConfigError, naming the field, for a value that is none of these.
    """
    hints = get_type_hints(kind)
    return {name: _read(name, hints[name], value) for name, value in values.items()}


def _read(name: str, hint: Any, value: Any) -> Any:
    kinds = get_args(hint) or (hint,)
    if value is None and type(None) in kinds:
        return None
    if name.endswith("_bytes"):
        return _size(name, value)
    if get_origin(hint) is tuple:
        return tuple(_text(name, each) for each in ([value] if isinstance(value, str) else _several(name, value)))
    readers = {bool: _flag, int: _count, float: _number, Path: _path, str: _text}
    return next(readers[kind] for kind in kinds if kind in readers)(name, value)


def _several(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list | tuple):
        _refuse(name, value, "a list of texts")
    return list(value)


def _size(name: str, value: Any) -> int:
    if isinstance(value, str):
        try:
            return parse_bytes(value)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None
    size = int(value) if isinstance(value, float) and value.is_integer() else _whole(value)
    if size is None:
        _refuse(name, value, 'a number of bytes or a text like "4GiB"')
    if size <= 0:
        raise ConfigError(f"{name} must be a positive number of bytes, not {size}")
    return size


def _count(name: str, value: Any) -> int:
    number = _whole(value)
    if number is None and isinstance(value, str):
        try:
            number = int(value)
        except ValueError:
            number = None
    if number is None:
        _refuse(name, value, "a whole number")
    if number < 1:
        raise ConfigError(f"{name} must be at least 1, not {truncated_repr(number)}")
    return number


def _whole(value: Any) -> int | None:
    """Return an integer of whatever type, numpy's too; None if it is none. Truth is no number."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _number(name: str, value: Any) -> float:
    if not isinstance(value, bool):
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):
            pass
    _refuse(name, value, "a number")


def _flag(name: str, value: Any) -> bool:
    found = value if isinstance(value, bool) else _FLAGS.get(value.lower()) if isinstance(value, str) else None
    if found is None:
        _refuse(name, value, "True or False")
    return found


def _path(name: str, value: Any) -> Path:
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str) or not path or "\0" in path:
        _refuse(name, value, "a path")
    return Path(path).expanduser()


def _text(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if type(value).__module__ == "torch":  # torch.bfloat16, torch.device("cpu")
        return str(value).removeprefix("torch.")
    if isinstance(value, os.PathLike):
        return str(_path(name, value))
    _refuse(name, value, "a text")


def _refuse(name: str, value: Any, expected: str) -> NoReturn:
    raise ConfigError(f"{name} is {truncated_repr(value)}, where {expected} is expected")
