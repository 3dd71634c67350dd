"""A property's schema alone takes what the whole schema takes as the value of that property."""

from __future__ import annotations

import jsonschema
import pytest

from moeflow.text.answer_form.schema_part import property_schema

WHOLE = {
    "type": "object",
    "properties": {
        "plain": {"type": "integer"},
        "a/b~ %c": {"type": "array", "items": {"enum": [1, "x"]}},
        "item": {"$ref": "#/properties/a~1b~0%20%25c/items"},
        "tree": {"type": "array", "items": {"$ref": "#"}},
        "defined": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/word"}]},
        "literal": {"enum": [{"$ref": "#/$defs/word"}, "y"], "default": {"$ref": "#"}},
        "const": {"properties": {"const": {"$ref": "#/definitions/$ref"}}},
        "any": True,
    },
    "additionalProperties": False,
    "$defs": {"word": {"type": "string", "maxLength": 3}},
    "definitions": {"$ref": {"type": "boolean"}},
}
VALUES = [
    *(None, True, 1, 4, "x", "y", "long word", [], [1], ["x", 2], {}, {"const": True}, {"const": 1}),
    *([{"plain": 1}], [{"plain": "x"}], [{"tree": [{"item": "x"}]}], [{"tree": [{"item": 3}]}], [{"other": 1}]),
    *({"$ref": "#/$defs/word"}, {"$ref": "#/$defs/whole/$defs/word"}),
]


@pytest.mark.parametrize("name", WHOLE["properties"])
def test_values(name):
    part = jsonschema.Draft202012Validator(property_schema(WHOLE, name))
    whole = jsonschema.Draft202012Validator(WHOLE)
    judged = [part.is_valid(value) for value in VALUES]
    assert judged == [whole.is_valid({name: value}) for value in VALUES]
    assert True in judged


def test_a_schema_without_references_is_left_alone():
    assert property_schema(WHOLE, "plain") == {"type": "integer"}
