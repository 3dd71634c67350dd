"""How a setting is declared: its default, its option of the command line, and the settings that it depends on."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import msgspec

Kind = Literal[
    "text", "texts", "choice", "count", "number", "seconds", "bytes", "switch", "existing file", "new file", "folder"
]


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """How a setting is given on the command line."""

    flag: str
    help: str
    group: str
    kind: Kind
    choices: tuple[str, ...] = ()
    shown_default: str = ""  # in help; empty: the field's own default
    most: int | None = None  # of a count
    is_common: bool = False  # one of the few that --help shows
    is_served_only: bool = False  # only where the engine has a process of its own


def setting(
    flag: str, kind: Kind, help: str, *, group: str, default: Any = None, depends_on: tuple[str, ...] = (), **more: Any
) -> Any:
    """Return the field of a setting with an option. `more` are further fields of `Option`."""
    option = Option(flag=flag, help=help, group=group, kind=kind, **more)
    return dataclasses.field(default=default, metadata={"option": option, "depends_on": depends_on})
