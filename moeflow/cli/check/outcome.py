"""The result of a check, and the exceptions that end a check early."""

from __future__ import annotations

from typing import Literal

import msgspec

Status = Literal["ok", "FAILED", "warning", "absent", "skipped"]


class Failed(Exception):
    """The server broke a rule; the message names need and have."""


class Refused(Failed):
    """The server refused a request with a clear error, so that it may lack the feature."""


class Skipped(Exception):
    """This server gives no chance to test the rule; the message has the reason."""


def expect(condition: object, need: str) -> None:
    """Raise: Failed unless a condition holds."""
    if not condition:
        raise Failed(need)


def expect_equal(found: object, wanted: object, what: str) -> None:
    """Raise: Failed unless two values are equal."""
    expect(found == wanted, f"{what} must be {wanted!r}, not {found!r}")


class Result(msgspec.Struct, frozen=True):
    """The outcome of a check."""

    area: str
    check: str
    description: str
    source: str
    status: Status
    seconds: float
    reason: str = ""
    curl: str = ""  # reproduces a failure
