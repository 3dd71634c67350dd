"""Base classes for stored objects, and for requests, which are checked strictly.

A request has exact types and rules about several fields. `field_table.py` has a row for each known field of other
servers. Other unknown fields are refused, or omitted with a note in the answer's headers (`--unknown-fields`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, ClassVar, Final, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    GetJsonSchemaHandler,
    TypeAdapter,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from moeflow.core.near_names import did_you_mean
from moeflow.server.api.schema import left_out
from moeflow.server.api.schema.field_policy import Policy, Unset, ours, schema_of, with_defaults
from moeflow.server.api.schema.field_rules import Rule
from moeflow.server.api.schema.field_table import FIELD_TABLE

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
    """Base of objects that are stored and returned in the same form: all fields are always present."""

    model_config = ConfigDict(strict=True, json_schema_serialization_defaults_required=True)


class StrictModel(BaseModel):
    """Validates JSON as it stands: "5" is not 5, and a misspelt name is an error that names the right one."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    policies: ClassVar[Mapping[str, Policy]] = {}  # of fields in requests that are not ours, or not as they stand
    rules: ClassVar[tuple[Rule, ...]] = ()

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        rows = [FIELD_TABLE.get(base.__name__, {}) for base in reversed(cls.__mro__)]
        merged = {name: policy for table in rows for name, policy in table.items()}
        names = cls._names()  # a field of ours is not subject to the row of a base
        cls.policies = {name: row for name, row in merged.items() if isinstance(row, Unset) or name not in names}

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        names, policies = cls._names(), cls.policies
        if data.keys() <= names and policies.keys().isdisjoint(data):
            return data  # as nearly always: a conversation has thousands of messages
        known = cls._given({name: value for name, value in data.items() if name in names})
        others: dict[str, Any] = {}
        for name, value in data.items():
            if name in names:
                continue
            if name in policies:
                found = cls._given(_ours(name, policies[name], value))
                cls._check_unused(name, {key: one for key, one in found.items() if known.get(key) is not None})
                others = with_defaults(others, found)
            elif value is not None:  # clients send null for each field that they know
                cls._leave_out(name)
        return with_defaults(known, others)

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
        properties = own.setdefault("properties", {})
        for name, policy in sorted(cls.policies.items(), key=lambda row: not isinstance(row[1], Unset)):
            if (schema_of_row := schema_of(name, policy, properties)) is not None:
                properties[name] = schema_of_row
        if cls.rules:
            own["allOf"] = [rule.schema for rule in cls.rules]
        return schema

    @classmethod
    def _names(cls) -> set[str]:
        """Return the fields as requests name them."""
        return {field.alias or name for name, field in cls.model_fields.items()}

    @classmethod
    def _given(cls, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return our fields, except for values that mean "not set"."""
        rows = cls.policies
        return {name: value for name, value in fields.items() if not _is_unset(rows.get(name), value)}

    @classmethod
    def _check_unused(cls, name: str, fields: Mapping[str, Any]) -> None:
        """Check values of our fields that do not count, since the request has these fields, too."""
        for key, value in fields.items():
            try:
                _adapter(cls, key).validate_python(value)
            except ValidationError as error:
                raise refusal(name, str(error.errors()[0]["msg"])) from None

    @classmethod
    def _leave_out(cls, name: str) -> None:
        """Note that a field is left out, where the server is set so. Raises: PydanticCustomError otherwise."""
        if not left_out.ignores_unknown_fields():
            hint = did_you_mean(name, cls._names(), "leave it out", _ALIKE, _LIKENESS)
            raise refusal(name, f"unknown field {name[:80]!r}: {hint}")
        left_out.leave_out(name)


@functools.cache
def _adapter(model: type[StrictModel], field: str) -> TypeAdapter[Any]:
    """Return the validator of one field."""
    return TypeAdapter(model.model_fields[field].rebuild_annotation(), config=ConfigDict(strict=True))


def _ours(name: str, policy: Policy, value: Any) -> dict[str, Any]:
    try:
        return ours(name, policy, value)
    except ValueError as error:
        raise refusal(name, str(error)) from None


def _is_unset(policy: Policy | None, value: Any) -> bool:
    return isinstance(policy, Unset) and policy.drops(value)


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
                if inner["type"] == "refused":  # a member has reported a more exact error
                    raise refusal(inner["ctx"]["field"], inner["ctx"]["reason"]) from None
            raise PydanticCustomError("no_member", "must be {expected}", {"expected": expected}) from None

    return WrapValidator(check)
