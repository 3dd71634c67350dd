"""What an answer turns out to be, piece by piece: text for the user, reasoning, calls of tools."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What the model says to itself."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call of a tool begins; its arguments follow."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of the JSON that the last tool is called with."""

    text: str


Event = Content | Reasoning | CallBegun | Arguments
