"""A schema without unknown keywords takes the same values, as an independent validator judges them."""

from __future__ import annotations

import jsonschema
import pytest

from moeflow.text.answer_form.known_keywords import in_known_keywords
from tests.engine.constraints.test_suite import GROUPS

SCHEMAS = [
    {"dependentRequired": {"a": ["b"], "b": ["c", "a"]}, "allOf": [{"maxProperties": 2}]},
    {"dependentSchemas": {"a": {"required": ["b"], "properties": {"b": {"const": 1}}}, "c": False}},
    {"propertyNames": {"pattern": "[ab]", "description": "Names."}, "additionalProperties": {"const": 1}},
    {"propertyNames": {"enum": ["a", "b", 1], "type": "string"}, "additionalProperties": {"const": 1}},
    {"propertyNames": {"type": "string", "title": "Names"}, "maxProperties": 1},
    {"propertyNames": {"enum": ["a"]}, "properties": {"b": {"const": 1}}},
    {"propertyNames": False},
    {"not": {"description": "Anything."}, "allOf": [{"maxProperties": 2}]},
    {"not": {"required": ["a"]}},
    {"not": False, "uniqueItems": False, "unevaluatedProperties": True},
]
VALUES = [
    *({}, {"a": 1}, {"b": 1}, {"a": 1, "b": 1}, {"a": 1, "b": 2}, {"a": 1, "b": 1, "c": 1}, {"c": 1}, {"d": 2}),
    *([], [1, 1], "a", 1, None),
]


def judged(schema, values):
    validator = jsonschema.Draft202012Validator(schema)
    return [validator.is_valid(value) for value in values]


@pytest.mark.parametrize("schema", SCHEMAS, ids=str)
def test_values(schema):
    said = in_known_keywords(schema)
    assert judged(said, VALUES) == judged(schema, VALUES)


def test_dependencies_of_older_drafts():
    schema = {"dependencies": {"a": ["b"], "b": {"required": ["c"]}}}
    said = in_known_keywords(schema)
    assert "dependencies" not in said
    assert judged(said, VALUES) == [jsonschema.Draft7Validator(schema).is_valid(value) for value in VALUES]


def test_json_schemas_own_test_suite():
    """All but the old `dependencies`, and `unevaluatedProperties`, which is refused beside any keyword."""
    num_said = 0
    for group in GROUPS:
        schema = group["schema"]
        said = in_known_keywords(schema) if isinstance(schema, dict) else schema
        has_equal = not isinstance(schema, dict) or schema.keys().isdisjoint(("dependencies", "unevaluatedProperties"))
        if said != schema and has_equal:
            values = [test["data"] for test in group["tests"]]
            assert judged(said, values) == judged(schema, values), group["description"]
            num_said += 1
    assert num_said > 10


@pytest.mark.parametrize(
    ("keyword", "kept", "dropped"),
    [
        ("format", ["date", "uri-reference", 3], ["markdown", "int32"]),
        (
            "$schema",
            ["http://json-schema.org/draft-07/schema#", "https://json-schema.org/draft/2020-12/schema"],
            ["https://json-schema.org/draft-07/schema#", "http://json-schema.org/schema#", "mine", None],
        ),
        ("uniqueItems", [True], [False]),
    ],
)
def test_what_has_no_effect_is_dropped(keyword, kept, dropped):
    for value in kept:
        assert in_known_keywords({keyword: value}) == {keyword: value}
    for value in dropped:
        assert in_known_keywords({keyword: value}) == {}
