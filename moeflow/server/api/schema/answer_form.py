"""The form of an answer: `response_format` as OpenAI says it, `structured_outputs` and `guided_*` as vLLM does."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, Tag

from moeflow.core.errors import RequestError
from moeflow.server.api.schema.field_rules import Rule
from moeflow.server.api.schema.strict_model import StrictModel, one_of, refusal
from moeflow.server.api.schema.tagged import by_type, known_types
from moeflow.text.answer_form.form import ChoiceForm, Form, JsonForm, UserGrammar

MAX_CHOICES = 4096
_FORMS = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
_KINDS = ("json", "regex", "choice", "grammar", "json_object")


def _one_of_fields(names: tuple[str, ...], message: str) -> Rule:
    """Return the rule that at most one of these fields is given.

    The document does not state it: with those of the fields beside these, what reads documents gives up.
    """
    return Rule("", message, lambda fields: sum(_is_form(fields[name]) for name in names) <= 1, {})


def _is_form(value: Any) -> bool:
    return value is not None and not isinstance(value, TextFormat)


def _check_text(text: str) -> str:
    if "\0" in text:
        raise refusal("", "a zero byte cannot be part of an answer")
    return text


Choice = Annotated[
    str, Field(min_length=1, json_schema_extra={"not": {"pattern": "\\u0000"}}), AfterValidator(_check_text)
]
Choices = Annotated[list[Choice], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
Pattern = Annotated[str, Field(min_length=1, description="A regular expression, of the whole answer.")]
Grammar = Annotated[str, Field(min_length=1, description="Lark as llguidance reads it, or GBNF.")]
Schema = Annotated[
    dict[str, Any] | Annotated[str, Field(min_length=1, description="The same as JSON text.")],
    one_of("a JSON Schema, as an object or as JSON text"),
]


class JsonSchema(StrictModel):
    """A schema and its name."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = Field(None, description="Accepted; answers are always as the schema says.")


class TextFormat(StrictModel):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(StrictModel):
    """Any JSON object, or one that a schema describes, as llama.cpp's clients ask for it."""

    type: Literal["json_object"]
    schema_: dict[str, Any] | None = Field(None, alias="schema")

    @property
    def form(self) -> JsonForm:
        """The form that it asks for."""
        return JsonForm(self.schema_ or {"type": "object"})


class JsonSchemaFormat(StrictModel):
    """JSON that a schema describes."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[
    Annotated[TextFormat, Tag("<text>")]
    | Annotated[JsonObjectFormat, Tag("<json_object>")]
    | Annotated[JsonSchemaFormat, Tag("<json_schema>")],
    by_type(),
    known_types("formats", ("text", "json_object", "json_schema")),
]


class StructuredOutputs(StrictModel):
    """One of several ways to define the form of an answer."""

    rules: ClassVar[tuple[Rule, ...]] = (_one_of_fields(_KINDS, f"give one of {', '.join(_KINDS)}"),)

    json_: Schema | None = Field(None, alias="json")
    regex: Pattern | None = None
    choice: Choices | None = None
    grammar: Grammar | None = None
    json_object: bool | None = None


class AnswerFormFields(StrictModel):
    """The form that an answer must have."""

    rules: ClassVar[tuple[Rule, ...]] = (
        _one_of_fields(_FORMS, f"the answer can have one form only: give one of {', '.join(_FORMS)}"),
    )

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: Pattern | None = None
    guided_choice: Choices | None = None
    guided_grammar: Grammar | None = None

    def answer_form(self) -> Form | None:
        """Return the form; None: any. Raises: RequestError if a schema is no JSON object."""
        match self.response_format:
            case JsonObjectFormat():
                return self.response_format.form
            case JsonSchemaFormat():
                return JsonForm(self.response_format.json_schema.schema_ or {"type": "object"})
        if (wish := self.structured_outputs) is not None:
            found = _form(wish.json_, wish.regex, wish.choice, wish.grammar)
            return JsonForm({"type": "object"}) if found is None and wish.json_object else found
        return _form(self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar)


def _form(
    schema: dict[str, Any] | str | None, regex: str | None, choices: list[str] | None, grammar: str | None
) -> Form | None:
    if schema is not None:
        return JsonForm(_read_schema(schema) if isinstance(schema, str) else schema)
    if regex is not None:
        return UserGrammar(regex, is_regex=True)
    if choices is not None:
        return ChoiceForm(choices)
    return None if grammar is None else UserGrammar(grammar, is_regex=False)


def _read_schema(text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the schema is not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise RequestError("the schema is no JSON object")
    return schema
