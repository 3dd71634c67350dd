"""Arguments that a model has to write one by one, in syntaxes that have them plainly.

They come in the order of the schema, those that need not be there or not. Other names may come only if the schema has
no list of names.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from moeflow.core.errors import RequestError
from moeflow.engine.text.answer_form.form import ChoiceForm
from moeflow.engine.text.answer_form.lark import LarkWriter
from moeflow.engine.text.tool_syntax.schema_place import TEXT_RULES, SchemaPlace
from moeflow.engine.text.tool_syntax.tool import Tool
from moeflow.engine.text.tool_syntax.written_call import argument_schema

ANY_KEY: Final = r"/[^\s<>:,{}]{1,64}/"
_DEFINITIONS: Final = ("$defs", "definitions")


def arguments_of(tool: Tool) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Yield the arguments of a tool: key, schema, and whether it has to be there."""
    schema = argument_schema(tool)
    shared: dict[str, Any] = {name: schema[name] for name in _DEFINITIONS if name in schema}
    schema |= SchemaPlace.of(schema).referred
    required = schema.get("required") or ()
    for key, described in (schema.get("properties") or {}).items():
        yield key, {**shared, **(described if isinstance(described, dict) else {})}, key in required


def takes_any(tool: Tool) -> bool:
    """Return whether arguments of any name are welcome, as of a tool that is not strict and names none."""
    schema = argument_schema(tool)
    schema |= SchemaPlace.of(schema).referred
    return not tool.is_strict and "properties" not in schema and schema.get("additionalProperties") is not False


def written_value(lark: LarkWriter, tool: Tool, key: str, schema: dict[str, Any], end: str) -> str:
    """Return the expression for a value and the end behind it: text plainly, all else as JSON.

    Raises: RequestError if it is text that has to have a form, and the tool is strict.
    """
    values = tool.arguments.property(key).values
    if values.has_only_strings and values.literals and "string" not in values.types:
        choices = [str(choice) for choice in values.literals.values()]
        return f"{lark.form(ChoiceForm(choices))} {lark.text(end)}"
    if not values.is_text:
        return f"{lark.json(schema)} {lark.text(end)}"
    unheld = next((name for name in TEXT_RULES if name in values.text_rules), None)
    if unheld is not None and tool.is_strict:
        raise RequestError(
            f"{unheld} of the argument {key!r} of {tool.name!r} cannot be enforced in the form in which this model "
            "calls tools; leave it out, or strict",
            param="tools",
        )
    return lark.text_until(end)
