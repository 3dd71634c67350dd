"""Tables that other packages extend: moeflow's own rows, and entry points of installed packages.

An entry point's name is the row's; its value is imported when that row is taken, so neither `--help` nor another row
waits for it. How to write one: `docs/guides/extend.md`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from moeflow.core.errors import ConfigError
from moeflow.kernels.on_demand import on_demand

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

with on_demand(__name__):
    from importlib import metadata  # takes a twentieth of a second, mostly to find nothing

Value = TypeVar("Value")


class ExtensibleTable(Mapping[str, Value], Generic[Value]):
    """Rows by name, moeflow's own first, then those of other packages in the order of the alphabet."""

    def __init__(self, group: str, own: Mapping[str, Value], kind: type | None = None) -> None:
        """Take the group of entry points, and what a row must be an instance of; None: something to be called."""
        self._group, self._own, self._kind = group, own, kind
        self._loaded: dict[str, Value] = {}

    def __getitem__(self, name: str) -> Value:
        """Return a row, imported if another package has it.

        Raises: KeyError if there is none; ConfigError if two packages offer it, or what one offers cannot be used.
        """
        if name not in self._loaded:
            offered = self._offered.get(name, [])
            if len(offered) + (name in self._own) > 1:
                raise ConfigError(
                    f"{_packages(offered)} adds {name!r} to {self._group}, which "
                    f"{'moeflow has itself' if name in self._own else 'is one too many'}: "
                    f"uninstall {'it' if len(offered) == 1 else 'all but one'}, or give its entry point another name"
                )
            self._loaded[name] = self._load(offered[0]) if offered else self._own[name]
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names; imports nothing."""
        yield from self._own
        yield from sorted(set(self._offered) - set(self._own))

    def __len__(self) -> int:
        return len({*self._own, *self._offered})

    def __contains__(self, name: object) -> bool:
        """Whether there is such a row; imports nothing."""
        return name in self._own or name in self._offered

    @cached_property
    def _offered(self) -> dict[str, list[EntryPoint]]:
        found: dict[str, list[EntryPoint]] = {}
        for point in metadata.entry_points(group=self._group) if _is_offered(self._group) else ():
            # A package that is installed in two places of the path is still one.
            if point.value not in (other.value for other in found.setdefault(point.name, [])):
                found[point.name].append(point)
        return found

    def _load(self, point: EntryPoint) -> Value:
        try:
            value: Any = point.load()
        except Exception as error:  # whatever another package's code raises
            raise ConfigError(
                f"{point.name!r} of {self._group} cannot be imported from {_packages([point])} ({point.value}): "
                f"{type(error).__name__}: {error}. Fix or uninstall the package"
            ) from error
        if not (callable(value) if self._kind is None else isinstance(value, self._kind)):
            wanted = "something to be called" if self._kind is None else f"a {self._kind.__name__}"
            raise ConfigError(
                f"{point.name!r} of {self._group} has to be {wanted}; {_packages([point])} ({point.value}) has a "
                f"{type(value).__name__} there. docs/guides/extend.md shows what to write"
            )
        return cast(Value, value)


def _is_offered(group: str) -> bool:
    """Return whether files of installed packages name a group. Archives are not searched."""
    header = f"[{group}]".encode()
    files = (file for folder in sys.path for file in Path(folder).glob("*.*-info/entry_points.txt"))
    return any(header in _content(file) for file in files)


def _content(file: Path) -> bytes:
    """Return what a file has; nothing if it cannot be read, which is another package's fault."""
    try:
        return file.read_bytes()
    except OSError:
        return b""


def _packages(points: list[EntryPoint]) -> str:
    names = sorted({point.dist.name if point.dist else "an unnamed package" for point in points})
    return f"the package {names[0]}" if len(names) == 1 else f"each of the packages {', '.join(names)}"
