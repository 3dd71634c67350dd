"""Typed access to JSON that people write: every error names file, field, cause and remedy.

An object remembers which of its fields were asked for, so that a misspelt one is an error and not silence.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar

from moeflow.core.brief import brief
from moeflow.core.errors import ConfigError
from moeflow.core.units import parse_bytes
from moeflow.core.untrusted import UnreadableError, parse_json
from moeflow.kernels.on_demand import on_demand

if TYPE_CHECKING:
    from moeflow.core import near_names
else:
    near_names = on_demand("moeflow.core.near_names")

Item = TypeVar("Item")
_LARGEST: Final = sys.float_info.max


def read_json(text: str | bytes, file: str, read: Callable[[Fields], Item]) -> Item:
    """Return what `read` makes of a text's outermost object; `file` names it in messages.

    Raises: ConfigError if it is no JSON, or a field is missing, unknown, of the wrong kind or out of range.
    """
    try:
        raw = parse_json(text)
    except UnreadableError as error:
        raise ConfigError(f"{file}: is no JSON ({error}). Compare it with one that moeflow made") from None
    fields = Fields(raw, file, "")
    made = read(fields)
    fields.done()
    return made


class Fields:
    """One JSON object; remembers which of its fields were asked for."""

    def __init__(self, raw: Any, file: str, place: str) -> None:
        self.file = file
        self.place = place
        self._known: set[str] = set()
        if not isinstance(raw, Mapping):
            raise ConfigError(f"{file}: {place or 'all of it'} is {brief(raw)}. Write an object: {{...}}")
        self.raw = raw

    def error(self, key: str, cause: str, remedy: str) -> ConfigError:
        """Return an error that blames a field."""
        return ConfigError(f"{self.file}: {self._place(key)} {cause}: {remedy}")

    def done(self) -> None:
        """Raises: ConfigError if there is a field that nobody asked for."""
        for key in self.raw:
            if key not in self._known:
                hint = near_names.did_you_mean(key, self._known, f"known are {', '.join(sorted(self._known))}")
                raise self.error(key, "is unknown", hint)

    def _get(self, key: str, default: Any) -> Any:
        self._known.add(key)
        value = self.raw.get(key, default)
        if value is None:
            raise self.error(key, "is missing", "add it")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Return a text; empty only by default."""
        value = self._get(key, default)
        if not isinstance(value, str) or (default is None and not value):
            raise self.error(key, f"is {brief(value)}", "write a text")
        return value

    def one_of(self, key: str, names: tuple[str, ...]) -> str:
        """Return one of several names."""
        value = self.text(key)
        if value not in names:
            raise self.error(key, f"is {brief(value)}", f"use one of {', '.join(names)}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"is {brief(value)}", "write true or false")
        return value

    def number(self, key: str, default: float | None = None, least: float | None = None) -> float:
        """Return a finite number, above 0 or at least `least`."""
        value = self._get(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST
        if not is_number or (value <= 0 if least is None else value < least):
            bound = "above 0" if least is None else f"of at least {least:g}"
            raise self.error(key, f"is {brief(value)}", f"write a number {bound}")
        return float(value)

    def count(self, key: str, default: int | None = None, least: int = 1) -> int:
        """Return a whole number."""
        value = self._get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.error(key, f"is {brief(value)}", f"write a whole number of at least {least}")
        return value

    def num_bytes(self, key: str) -> int:
        """Return a size: a number or a text like "16GiB"."""
        value = self._get(key, None)
        if isinstance(value, str):
            try:
                return parse_bytes(value)
            except ConfigError as error:
                raise self.error(key, f"cannot be read ({error})", "write a number of bytes or a size") from None
        return int(self.number(key))

    def mapping(self, key: str, default: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        """Return an inner object as it is."""
        value = self._get(key, default)
        if not isinstance(value, Mapping):
            raise self.error(key, f"is {brief(value)}", "write an object: {...}")
        return value

    def item(self, key: str, read: Callable[[Fields], Item]) -> Item:
        """Return what `read` makes of an inner object."""
        return self._read_one(self._get(key, None), self._place(key), read)

    def items(self, key: str, read: Callable[[Fields], Item], least: int = 1) -> tuple[Item, ...]:
        """Return what `read` makes of each object of a list."""
        value = self._get(key, [] if least == 0 else None)
        if not isinstance(value, list) or len(value) < least:
            raise self.error(
                key, f"is {brief(value)}", "write a list: [...]" + (", with something in it" if least else "")
            )
        return tuple(self._read_one(one, f"{self._place(key)}[{index}]", read) for index, one in enumerate(value))

    def _place(self, key: str) -> str:
        return key if not self.place else f"{self.place}.{key}"

    def _read_one(self, raw: Any, place: str, read: Callable[[Fields], Item]) -> Item:
        fields = Fields(raw, self.file, place)
        made = read(fields)
        fields.done()
        return made
