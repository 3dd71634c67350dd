"""Bases of models: of what is kept on disk, and of requests, which are checked exactly.

A request has exact types, no unknown field, rules about several fields, and a reason for every known field that is not
supported. A field that would change the answer is never ignored in silence.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final, NamedTuple, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    GetJsonSchemaHandler,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from moeflow.core.near_names import did_you_mean
from moeflow.server.api.schema.field_rules import Rule

# What OpenAI's, Anthropic's, transformers', llama.cpp's and Ollama's requests call the same thing.
_ALIKE: Final = (
    (
        "max_tokens",
        "max_output_tokens",
        "max_completion_tokens",
        "max_new_tokens",
        "max_length",
        "n_predict",
        "num_predict",
    ),
    ("stop", "stop_sequences", "stop_strings"),
    ("repetition_penalty", "repeat_penalty"),
    ("min_tokens", "min_new_tokens"),
    ("temperature", "temp"),
    ("n", "num_return_sequences"),
    ("messages", "input", "prompt"),
    ("include_usage", "usage"),
    ("guided_grammar", "grammar"),
)
_LIKENESS: Final = 0.75  # fields are many: "txet" is "text", but "best_of" is not "stop", nor "system" "stream"


class Record(BaseModel):
    """Base of what is kept on disk and answered in the same form: all fields are always there."""

    model_config = ConfigDict(strict=True, json_schema_serialization_defaults_required=True)


class Unsupported(NamedTuple):
    """A field of OpenAI's API that we cannot honour."""

    reason: str
    harmless: tuple[Any, ...] = ()  # values that ask for nothing; null always is one


class StrictModel(BaseModel):
    """Validates JSON as it stands: "5" is not 5, and a misspelt name is an error that names the right one."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    unsupported: ClassVar[dict[str, Unsupported]] = {}
    rules: ClassVar[tuple[Rule, ...]] = ()

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        names = cls._names()
        if data.keys() <= names:
            return data  # as nearly always: a conversation has thousands of messages
        known = {}
        for name, value in data.items():
            if name in names:
                known[name] = value
            elif value is None:
                continue  # null asks for nothing: clients send it for each field that they know
            elif name not in cls.unsupported:
                raise refusal(name, cls._unknown(name))
            elif value not in cls.unsupported[name].harmless:
                raise refusal(name, f"{name} is not supported: {cls.unsupported[name].reason}")
        return known

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        if not self.rules:
            return self
        given = self.model_fields_set
        fields = {
            field.alias or name: getattr(self, name) if name in given else None
            for name, field in type(self).model_fields.items()
        }
        for rule in self.rules:
            if not rule.holds(fields):
                raise refusal(rule.field, rule.message)
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler(core_schema)
        own = handler.resolve_ref_schema(schema)
        own["additionalProperties"] = {"type": "null"}
        if cls.rules:
            own["allOf"] = [rule.schema for rule in cls.rules]
        return schema

    @classmethod
    def _names(cls) -> set[str]:
        """Return the fields as requests name them."""
        return {field.alias or name for name, field in cls.model_fields.items()}

    @classmethod
    def _unknown(cls, name: str) -> str:
        hint = did_you_mean(name, cls._names(), "leave it out", _ALIKE, _LIKENESS)
        return f"unknown field {name[:80]!r}: {hint}"


def refusal(field: str, message: str) -> PydanticCustomError:
    """Return a validation error with its own words about one field, "" for the value as a whole."""
    return PydanticCustomError("refused", "{reason}", {"reason": message, "field": field[:80]})


def one_of(expected: str) -> WrapValidator:
    """Replace the many complaints of a union's members by one sentence: "must be {expected}"."""

    def check(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        try:
            return validate(value)
        except ValidationError as error:
            for inner in error.errors(include_input=False, include_url=False):
                if inner["type"] == "refused":  # a member has said more exactly what is wrong
                    raise refusal(inner["ctx"]["field"], inner["ctx"]["reason"]) from None
            raise PydanticCustomError("no_member", "must be {expected}", {"expected": expected}) from None

    return WrapValidator(check)
