"""The arguments of a call as a JSON object, for APIs that have them so."""

from __future__ import annotations

from typing import Any

from pydantic_core import from_json

from moeflow.text.answer_reader import AnswerReader
from moeflow.text.tool_syntax.events import Arguments
from moeflow.text.tool_syntax.json_values import json_pieces
from moeflow.text.tool_syntax.reader import Reader, Steps


def read_object(reader: Reader) -> Steps[None]:
    """Yield the JSON object that a call was written with, as far as it is one: no client takes anything else."""
    yield from reader.skip_space()
    if (yield from reader.char()) == "{":
        yield from json_pieces(reader, Arguments)


def parsed_object(text: str) -> dict[str, Any]:
    """Return a call's arguments from the text of `read_object`. Of an incomplete value it is the certain part."""
    parsed: dict[str, Any] = from_json(text, allow_partial=True) if text else {}
    return parsed


def arguments_of(text: str) -> dict[str, Any]:
    """Return the arguments that a whole call was written with."""
    pieces = AnswerReader(read_object).push(text)
    return parsed_object("".join(piece.text for piece in pieces if isinstance(piece, Arguments)))
