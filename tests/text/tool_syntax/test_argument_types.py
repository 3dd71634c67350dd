"""Arguments have the types of their schemas. Judges: jsonschema, and Pydantic, which writes the schemas of agents."""

from __future__ import annotations

import contextlib
import json
from typing import Any, Literal

import jsonschema
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeflow.text.answer_reader import AnswerReader
from moeflow.text.tool_syntax.events import Arguments
from moeflow.text.tool_syntax.tool import Tool, Tools
from moeflow.text.tool_syntax.typed_arguments import with_types
from tests.text.tool_syntax.test_syntaxes import BY_NAME, WRITERS, glm4, qwen3_coder

PLAIN = [("qwen3_coder", qwen3_coder), ("glm4", glm4)]
JSON_LIKE = [one for one in WRITERS if one not in PLAIN]


def arguments_text(name, text, schema, cuts=()):
    """Return the JSON of the arguments in an answer that comes in pieces, and the pieces."""
    tools = Tools((Tool("look", None, schema),))
    reader = AnswerReader(lambda reader: with_types(BY_NAME[name].read(reader, tools), tools))
    events, last = [], 0
    for cut in [*sorted(cuts), len(text)]:
        events += reader.push(text[last:cut])
        last = cut
    pieces = [event.text for event in events + reader.finish() if isinstance(event, Arguments)]
    return "".join(pieces), pieces


def read(name, write, arguments, schema):
    """Return the arguments that are read. A cut at each character changes nothing."""
    text = write([("look", arguments)])
    whole, _ = arguments_text(name, text, schema)
    assert arguments_text(name, text, schema, range(1, len(text)))[0] == whole
    return json.loads(whole)


SHARED = {
    "digits": {"enum": ["1", "2"]},
    "numbers": {"enum": [1, 2]},
    "text": {"type": "string"},
    "again": {"$ref": "#/$defs/text"},
    "a/b~c d": {"const": "3"},
    "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {"type": "string"}]},
}


@pytest.mark.parametrize(("name", "write"), PLAIN)
@pytest.mark.parametrize(
    ("schema", "written", "meant"),
    [
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "12345", "12345"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "None", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, '"quoted"', '"quoted"'),
        ({"type": "string"}, "null", "null"),
        ({"type": "string", "description": "x", "default": None}, " 1.50 ", " 1.50 "),
        ({"oneOf": [{"type": "string"}, {"type": "array"}]}, "12345", "12345"),
        ({"oneOf": [{"type": "string"}, {"type": "array"}]}, "[1]", [1]),
        ({"allOf": [{"type": ["string", "integer"]}, {"type": ["string", "null"]}]}, "12345", "12345"),
        ({"$ref": "#/$defs/text"}, "12345", "12345"),
        ({"$ref": "#/$defs/again"}, "12345", "12345"),
        ({"anyOf": [{"$ref": "#/$defs/again"}, {"type": "null"}]}, "12345", "12345"),
        ({"$ref": "#/properties/sibling"}, "12345", "12345"),
        ({"$ref": "#/$defs/digits"}, "1", "1"),
        ({"$ref": "#/$defs/numbers"}, "1", 1),
        ({"$ref": "#/$defs/a~1b~0c%20d"}, "3", "3"),
        ({"const": "12345"}, "12345", "12345"),
        ({"const": 5}, "5", 5),
        ({"enum": ["a", 7, None]}, "7", 7),
        ({"enum": ["a", "7", None]}, "7", "7"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": "string"}, "True", "True"),
        ({"type": "integer"}, "3.0", 3),
        ({"type": "number"}, "3", 3),
        ({"type": "integer"}, "3.5", "3.5"),
        ({"type": "integer"}, "three", "three"),
        ({"type": "object"}, "[1]", "[1]"),
        ({"type": "number"}, "1e400", "1e400"),
        ({}, "12345", 12345),
        ({}, r'"\ud83d"', "\ufffd"),
        ({"$ref": "#/$defs/nothing"}, "12345", 12345),
        ({"$ref": "https://example.com/schema"}, "12345", 12345),
        ({"type": "text"}, "12345", 12345),
        ({"enum": 3, "type": [["string"]], "anyOf": {}, "$ref": 1, "allOf": "x"}, "12345", 12345),
        (True, "12345", 12345),
    ],
)
def test_a_plain_value_is_what_its_schema_allows(name, write, schema, written, meant):
    whole = {"$defs": SHARED, "properties": {"x": schema, "sibling": {"type": "string"}}}
    found = read(name, write, {"x": written}, whole)["x"]
    assert (found, type(found)) == (meant, type(meant))


@pytest.mark.parametrize(("name", "write"), PLAIN)
@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/root", "$defs": {"root": {"properties": {"x": {"type": "string"}}}}},
        {"allOf": [{"properties": {"x": {"type": "string"}}}]},
        {"anyOf": [{"properties": {"x": {"type": "string"}}}, {"type": "string"}]},
        {"additionalProperties": {"type": "string"}},
    ],
)
def test_an_argument_may_be_described_anywhere(name, write, schema):
    assert read(name, write, {"x": "12345"}, schema) == {"x": "12345"}


TYPES = ["null", "boolean", "integer", "number", "string", "array", "object"]
LITERALS = st.sampled_from([None, True, 0, 1, 2.5, "1", "null", "a", "", [1], {"a": 1}])
LEAVES = st.one_of(
    st.just(True),
    st.sampled_from(TYPES).map(lambda name: {"type": name}),
    st.lists(st.sampled_from(TYPES), min_size=1, max_size=3, unique=True).map(lambda names: {"type": names}),
    st.lists(LITERALS, min_size=1, max_size=3).map(lambda choices: {"enum": choices}),
    LITERALS.map(lambda value: {"const": value}),
    st.sampled_from([*SHARED][:4]).map(lambda name: {"$ref": f"#/$defs/{name}"}),
    # Of types that differ: jsonschema refuses a value that two of them allow.
    st.lists(st.sampled_from(["null", "boolean", "number", "string"]), min_size=1, max_size=3, unique=True).map(
        lambda names: {"oneOf": [{"type": name} for name in names]}
    ),
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        *(
            st.lists(inner, min_size=1, max_size=3).map(lambda parts, name=name: {name: parts})
            for name in ("anyOf", "allOf")
        ),
        st.tuples(inner, inner).map(lambda both: {"allOf": [both[0]], "anyOf": [both[1]]}),
    ),
    max_leaves=6,
)
TEXTS = st.sampled_from(
    [
        "1",
        "0",
        "2",
        "1.0",
        "2.5",
        "-3",
        "1e2",
        "true",
        "True",
        "false",
        "null",
        "None",
        "a",
        "",
        "[1]",
        '{"a": 1}',
        "[1",
    ]
)
PYTHON = {"True": True, "False": False, "None": None}


def readings(text):
    """Return all values that a text may mean."""
    found: list[Any] = [text]
    with contextlib.suppress(ValueError):
        found.append(PYTHON[text] if text in PYTHON else json.loads(text))
    return found


@pytest.mark.parametrize(("name", "write"), PLAIN)
@settings(max_examples=150, deadline=None)
@given(schema=SCHEMAS, text=TEXTS)
def test_a_value_is_valid_if_any_reading_of_its_text_is(name, write, schema, text):
    whole = {"$defs": SHARED, "properties": {"x": schema}}
    judge = jsonschema.Draft202012Validator({"$defs": SHARED, "allOf": [schema]})
    value = read(name, write, {"x": text}, whole)["x"]
    if any(map(judge.is_valid, readings(text))):
        assert judge.is_valid(value), value
    else:
        assert value == text
    assert value in readings(text)


class Item(pydantic.BaseModel):
    id: str
    count: int | None = None
    labels: list[str] = []


class Question(pydantic.BaseModel):
    text: str
    note: str | None = None
    level: Literal["1", "2"] | None = None
    step: Literal[1, 2] = 1
    is_on: bool = False
    share: float | None = None
    size: int | str = 0
    items: list[Item] = []
    by_name: dict[str, Item] = {}
    first: Item | None = None


FULL = {
    "text": "007",
    "note": "12345",
    "level": "2",
    "step": 2,
    "is_on": True,
    "share": 0.5,
    "size": 3,
    "items": [{"id": "1", "count": 4, "labels": ["true", "8"]}, {"id": "2.50", "count": None, "labels": []}],
    "by_name": {"3": {"id": "3", "count": 1, "labels": ["-1"]}},
    "first": {"id": "9", "count": 9, "labels": []},
}


def confused(value: Any) -> Any:
    """Return a value with numbers for strings that look like numbers, and the reverse."""
    match value:
        case dict():
            return {key: confused(inner) for key, inner in value.items()}
        case list():
            return [confused(inner) for inner in value]
        case str() if value not in ("007", "2.50"):
            return json.loads(value)
        case bool() | int() | float():
            return json.dumps(value)
        case _:
            return value


@pytest.mark.parametrize(("name", "write"), JSON_LIKE, ids=lambda one: getattr(one, "__name__", ""))
def test_scalars_in_json_get_the_type_that_alone_is_allowed(name, write):
    schema = Question.model_json_schema()
    assert read(name, write, FULL, schema) == FULL
    found = read(name, write, confused(FULL), schema)
    assert found == {**FULL, "size": "3"}, "a type that is allowed stays"
    Question.model_validate(found, strict=True)


@pytest.mark.parametrize(("name", "write"), PLAIN)
def test_lists_and_objects_in_plain_values_get_types_too(name, write):
    found = read(name, write, {**FULL, "items": confused(FULL["items"])}, Question.model_json_schema())
    assert found == FULL


@pytest.mark.parametrize(
    ("schema", "written", "meant"),
    [
        ({"type": "string"}, "1.50", "1.50"),
        ({"type": "string"}, "true", "true"),
        ({"type": "string"}, "null", None),
        ({"type": "string"}, '"5"', "5"),
        ({"type": ["integer", "null"]}, '"5"', 5),
        ({"type": ["integer", "null"]}, '"null"', None),
        ({"type": ["integer", "null"]}, '"five"', "five"),
        ({"type": "integer"}, "5.0", 5),
        ({"type": "array", "items": {"type": "string"}}, '"[1, \\"a\\"]"', ["1", "a"]),
        ({"type": "array", "items": {"type": "string"}}, "[1, [2], {}]", ["1", [2], {}]),
        ({"type": "array", "prefixItems": [{"type": "string"}], "items": {"type": "string"}}, "[1]", [1]),
        ({"type": "object", "patternProperties": {"^a": {"type": "string"}}}, '{"a": 1}', {"a": 1}),
        ({"type": "object", "additionalProperties": {"type": "string"}}, '{"a": 1}', {"a": "1"}),
        ({"type": "object"}, '"{"', "{"),
    ],
)
def test_scalars_in_json(schema, written, meant):
    text = f'[TOOL_CALLS]look[ARGS]{{"x": {written}}}'
    for cuts in ((), range(1, len(text))):
        found, _ = arguments_text("mistral", text, {"properties": {"x": schema}}, cuts)
        assert json.loads(found) == {"x": meant}
        assert type(json.loads(found)["x"]) is type(meant)


@settings(max_examples=150, deadline=None)
@given(schema=SCHEMAS, text=TEXTS, data=st.data())
def test_arguments_in_json_are_the_beginning_of_json_at_any_time(schema, text, data):
    written = data.draw(st.sampled_from([text, json.dumps(text)]))
    text = f'[TOOL_CALLS]look[ARGS]{{"x": {written}, "y": [{written}]}}'[: data.draw(st.integers(0, 90))]
    whole = {"$defs": SHARED, "properties": {"x": schema, "y": {"items": schema}}}
    _, pieces = arguments_text("mistral", text, whole, range(1, len(text)))
    so_far = ""
    for piece in pieces:
        so_far += piece
        pydantic.TypeAdapter(Any).validate_json(so_far, experimental_allow_partial=True)


@pytest.mark.parametrize(("name", "write"), WRITERS, ids=lambda one: getattr(one, "__name__", ""))
def test_a_text_comes_as_it_is_written(name, write):
    text = write([("look", {"text": "x" * 100})])
    begin, schema = text.index("x" * 100), {"properties": {"text": {"type": "string"}}}
    _, pieces = arguments_text(name, text, schema, range(begin, begin + 100))
    assert pieces.count("x") > 90


@pytest.mark.parametrize(
    "text", ["look it up", '{"x": 1\\', '{"x": "\\q"} and', '{"x": nothing}', '{"x": 1} {"x": 2}', '[1] "']
)
def test_what_is_no_json_comes_as_it_is(text):
    """Only this syntax passes a whole message as arguments."""
    message = f"<|channel|>commentary to=functions.look <|constrain|>json<|message|>{text}<|call|>"
    for cuts in ((), range(1, len(message))):
        assert arguments_text("harmony", message, {"properties": {"x": {"type": "integer"}}}, cuts)[0] == text


@pytest.mark.parametrize(
    "kind", ["loop", "many references", "many literals", "many types", "long literals", "long references", "deep"]
)
def test_a_schema_that_is_long_to_follow_allows_anything(kind):
    loop: Any = {"anyOf": [{"$ref": "#/$defs/loop"}] * 2}
    many: Any = {"enum": [str(i) for i in range(5000)]}
    types: Any = {"type": ["string"] * 5000}
    literal: Any = {"const": "A" * 100_000}
    name = "B" * 100_000
    deep: Any = {"type": "string"}
    for _ in range(100):
        deep = {"allOf": [deep]}
    schema = {
        "loop": {"$ref": "#/$defs/loop"},
        "many references": {"anyOf": [{"$ref": "#/$defs/many"}] * 5000},
        "many literals": {"enum": [str(i) for i in range(30_000)]},
        "many types": {"anyOf": [{"$ref": "#/$defs/types"}] * 500},
        "long literals": {"anyOf": [{"$ref": "#/$defs/literal"}] * 500},
        "long references": {"anyOf": [{"$ref": f"#/$defs/{name}"}] * 500},
        "deep": deep,
    }[kind]
    shared = {"loop": loop, "many": many, "types": types, "literal": literal, name: {"type": "string"}}
    whole = {"$defs": shared, "properties": {"x": schema}}
    assert read("glm4", glm4, {"x": "1"}, whole) == {"x": 1}
