"""What an answer to the user has to be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class JsonForm:
    """JSON that a schema describes."""

    schema: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ChoiceForm:
    """One of these texts."""

    choices: Sequence[str]


@dataclass(frozen=True, slots=True)
class UserGrammar:
    """What a user's regular expression, or grammar in Lark or GBNF, describes."""

    text: str
    is_regex: bool


Form = JsonForm | ChoiceForm | UserGrammar
