"""Arguments that a model has to write one by one, in syntaxes that have them plainly.

They come in the order of the schema; optional ones may be absent. Other names may come only if the schema has
no list of names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from moeflow.core.errors import RequestError
from moeflow.text.answer_form.form import ChoiceForm
from moeflow.text.answer_form.known_keywords import in_known_keywords
from moeflow.text.answer_form.lark import LarkWriter
from moeflow.text.answer_form.schema_part import property_schema
from moeflow.text.tool_syntax.schema_place import TEXT_RULES, SchemaPlace
from moeflow.text.tool_syntax.tool import Tool
from moeflow.text.tool_syntax.written_call import argument_schema

ANY_KEY: Final = r"/[^\s<>:,{}]{1,64}/"
_LENGTHS: Final = frozenset(("minLength", "maxLength"))
_OF_ALL: Final[Sequence[str]] = (  # restrict arguments together
    *("allOf", "anyOf", "oneOf", "not", "if", "const", "enum", "$ref", "$dynamicRef"),
    *("propertyNames", "patternProperties", "minProperties", "maxProperties"),
)
_PARTS: Final = ("allOf", "anyOf", "oneOf", "$ref")  # of the schema of a value


def arguments_of(tool: Tool) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Yield the arguments of a tool: key, schema, and whether it has to be there.

    Raises: RequestError if the schema of a strict tool restricts more than single arguments.
    """
    schema = in_known_keywords(_followed(argument_schema(tool)))
    properties, required = schema.get("properties") or {}, schema.get("required") or ()
    unheld = [name for name in _OF_ALL if name in schema]
    if not set(required).issubset(properties):
        unheld.append("required")
    if unheld and tool.is_strict:
        raise _refusal(unheld[0])
    for key, described in properties.items():
        if described is not False or key in required:
            yield key, property_schema(schema, key), key in required


def takes_any(tool: Tool) -> bool:
    """Return whether arguments of any name are welcome, as of a tool that is not strict and names none."""
    schema = _followed(argument_schema(tool))
    return not tool.is_strict and "properties" not in schema and schema.get("additionalProperties") is not False


def written_value(lark: LarkWriter, tool: Tool, key: str, schema: dict[str, Any], end: str) -> str:
    """Return the expression for a value and the end behind it: text plainly, all else as JSON.

    Raises: RequestError if it is text that has to have a form, and the tool is strict.
    """
    if key in tool.patterns:
        return lark.text_until(end, pattern=tool.patterns[key])
    values = tool.arguments.property(key).values
    if values.has_only_strings and values.literals and "string" not in values.types:
        choices = [str(choice) for choice in values.literals.values()]
        return f"{lark.form(ChoiceForm(choices))} {lark.text(end)}"
    if not values.is_text:
        return f"{lark.json(schema)} {lark.text(end)}"
    schema = in_known_keywords(schema)
    is_whole = schema.keys().isdisjoint(_PARTS)
    rules = frozenset(schema) if is_whole else values.text_rules
    unheld: list[str] = [name for name in TEXT_RULES if name in rules and not (is_whole and name in _LENGTHS)]
    lengths = _lengths(schema) if is_whole else (0, None)
    if lengths is None:
        unheld.append("minLength or maxLength")
    if unheld and tool.is_strict:
        raise _refusal(f"{unheld[0]} of the argument {key!r}")
    if lengths is None or lengths == (0, None):
        return lark.text_until(end)
    return lark.bounded_text_until(end, *lengths)


def _followed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema with that to which its reference leads, if it is one."""
    referred = SchemaPlace.of(schema).referred if "$ref" in schema else {}
    rest = {name: value for name, value in schema.items() if name != "$ref"}
    return {**rest, **referred} if referred else schema


def _lengths(schema: dict[str, Any]) -> tuple[int, int | None] | None:
    """Return how many characters a text has, at least and at most; None, if no text has so many."""
    min_chars, max_chars = schema.get("minLength", 0), schema.get("maxLength")
    if not _is_count(min_chars) or not (max_chars is None or (_is_count(max_chars) and max_chars >= min_chars)):
        return None
    return min_chars, max_chars


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and value >= 0


def _refusal(unheld: str) -> RequestError:
    return RequestError(
        f"{unheld} cannot be enforced, as this model writes arguments one by one; leave it out, or ask for tool_choice "
        "auto without strict",
        param="tools",
    )
