"""A required call in the model's syntax: text around the allowed arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from moeflow.text.answer_form.lark import LarkWriter
from moeflow.text.tool_syntax.tool import Tool

NO_ARGUMENTS: Final[dict[str, Any]] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """One call."""

    head: str
    arguments: str  # a Lark expression
    tail: str = ""


def argument_schema(tool: Tool) -> dict[str, Any]:
    """Return what arguments have to be; none, where they are not described."""
    schema: dict[str, Any] = NO_ARGUMENTS if tool.parameters is None else {"type": "object", **tool.parameters}
    if not tool.patterns:
        return schema
    properties = {key: {"type": "string", "pattern": f"^(?:{text})$"} for key, text in tool.patterns.items()}
    return {**schema, "properties": {**schema.get("properties", {}), **properties}}


def json_arguments(lark: LarkWriter, tool: Tool) -> str:
    """Return the expression for arguments that are written as JSON."""
    return lark.json(argument_schema(tool))
