"""Schemas that cover what JSON Schema 2020-12 has, as far as it can be held to; and such as cannot."""

from __future__ import annotations

TEXT = {"type": "string", "maxLength": 8}
SUPPORTED = {
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "integer": {"type": "integer"},
    "number": {"type": "number"},
    "string": TEXT,
    "types": {"type": ["integer", "null", "boolean"]},
    "const": {"const": {"a": [1, "x", None]}},
    "enum": {"enum": ["red", 3, None, [1, 2], {"k": True}, 'a "quote"']},
    "minimum": {"type": "integer", "minimum": 17, "maximum": 23},
    "exclusive": {"type": "integer", "exclusiveMinimum": -3, "exclusiveMaximum": 2},
    "number range": {"type": "number", "minimum": 0.5, "maximum": 1.75},
    "exclusive number": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700},
    "lengths": {"type": "string", "minLength": 3, "maxLength": 5},
    "pattern": {"type": "string", "pattern": "^[a-c]{2}-[0-9]{1,3}$"},
    "open pattern": {"type": "string", "pattern": "[0-9]x", "maxLength": 12},
    "date": {"type": "string", "format": "date"},
    "date-time": {"type": "string", "format": "date-time"},
    "time": {"type": "string", "format": "time"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "email": {"type": "string", "format": "email"},
    "object": {"type": "object", "properties": {"a": {"type": "integer"}, "b": TEXT}, "required": ["a", "b"]},
    "closed": {"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": False},
    "optional": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"type": "boolean"}, "c": {"type": "boolean"}},
        "required": ["b"],
        "additionalProperties": False,
    },
    "typed others": {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 2},
    "array": {"type": "array", "items": {"type": "boolean"}, "maxItems": 4},
    "item count": {"type": "array", "items": {"type": "null"}, "minItems": 2, "maxItems": 3},
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "integer"}, {"type": "boolean"}],
        "items": False,
        "minItems": 2,
    },
    "nested": {
        "type": "object",
        "properties": {
            "points": {
                "type": "array",
                "maxItems": 2,
                "items": {
                    "type": "object",
                    "properties": {"x": {"type": "integer"}, "tags": {"type": "array", "items": {"enum": ["p", "q"]}}},
                    "required": ["x", "tags"],
                    "additionalProperties": False,
                },
            }
        },
        "required": ["points"],
        "additionalProperties": False,
    },
    "any of": {"anyOf": [{"type": "integer"}, {"type": "null"}, {"type": "array", "maxItems": 0}]},
    "one of": {"oneOf": [{"type": "integer"}, {"type": "boolean"}]},
    "all of": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]},
    "references": {
        "$defs": {"flag": {"type": "boolean"}},
        "type": "object",
        "properties": {"f": {"$ref": "#/$defs/flag"}},
        "required": ["f"],
        "additionalProperties": False,
    },
    "recursive": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "v": {"type": "boolean"},
                    "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
                },
                "required": ["v", "next"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    },
    "titles": {"type": "integer", "title": "A", "description": "b", "default": 3, "examples": [1]},
    "unicode": {"enum": ["größer", "你好", "🦊", "\u0007", "a\\b/c"]},
    "nothing": {},
    "empty object": {"type": "object", "properties": {}, "additionalProperties": False},
    "pattern properties": {
        "type": "object",
        "patternProperties": {"^x_": {"type": "boolean"}},
        "additionalProperties": False,
        "maxProperties": 2,
    },
}
UNSUPPORTED = {
    "not": {"not": {"type": "string"}},
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "if": {"if": {"type": "string"}, "then": {"maxLength": 3}},
    "contains": {"type": "array", "contains": {"type": "integer"}},
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "propertyNames": {"type": "object", "propertyNames": {"maxLength": 3}},
    "type": {"type": "text"},
    "reference": {"$ref": "#/$defs/missing"},
    "elsewhere": {"$ref": "https://example.com/schema.json"},
    "impossible": {"type": "integer", "minimum": 3, "maximum": 2},
    "pattern": {"type": "string", "pattern": "a(b"},
    "backreference": {"type": "string", "pattern": r"(a)\1"},
}
