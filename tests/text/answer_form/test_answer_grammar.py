"""Any text allowed by a grammar parses into the requested form: calls with valid arguments, reasoning, answers.

The model here writes a random allowed token, with the markers as tokens of its own or as plain text.
"""

from __future__ import annotations

import json
import random

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from moeflow.core.errors import RequestError
from moeflow.engine.constraints.grammar_tokens import tokens_of
from moeflow.text.answer_form.answer_grammar import AnswerWish, answer_grammar, can_limit_reasoning
from moeflow.text.answer_form.form import ChoiceForm, JsonForm
from moeflow.text.answer_form.lark import LarkWriter
from moeflow.text.chat_format import ChatFormat
from moeflow.text.tokenizer import Tokenizer
from moeflow.text.tool_syntax.events import Arguments, CallBegun, Content, Reasoning
from moeflow.text.tool_syntax.tool import Tool
from tests.engine.fakes import byte_level_core, wrap
from tests.text.test_chat_format import SIGNS

SCHEMA = {
    "type": "object",
    "$defs": {"flag": {"type": "boolean"}, "level": {"type": "string", "enum": ["1", "2"]}},
    "properties": {
        "text": {"type": "string"},
        "unit": {"type": "string", "enum": ["c", "f"]},
        "count": {"type": "integer", "minimum": 3, "maximum": 12},
        "flags": {"type": "array", "items": {"$ref": "#/$defs/flag"}, "maxItems": 2},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "code": {"anyOf": [{"type": "string", "pattern": "^[0-9]{2}$"}, {"type": "null"}]},
        "level": {"$ref": "#/$defs/level"},
    },
    "required": ["text", "count", "level"],
    "additionalProperties": False,
}
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
TOOLS = (Tool("look", None, SCHEMA, True), Tool("go", None, None, True))
MAX_TOKENS = 400
ENDS = set(b'"}]<>|/')  # tokens of these are written more often, or answers would seldom end


def tokenizer_of(template: str, *, has_tokens: bool) -> Tokenizer:
    markers = [*dict.fromkeys(ChatFormat(template).all_markers)] if has_tokens else []
    return wrap(byte_level_core(), eos_token="<|turn|>", chat_template=template, extra_special_tokens=markers)


def write(tokenizer: Tokenizer, vocabulary: LLTokenizer, grammar: str, seed: int) -> tuple[str, bool]:
    """Return a random text of a grammar, and whether it came to its end."""
    matcher, rng, text = LLMatcher(vocabulary, grammar), random.Random(seed), b""
    assert not matcher.is_error(), matcher.get_error()
    token_ids = range(vocabulary.vocab_size)
    is_end = np.array([not ENDS.isdisjoint(tokenizer.token_bytes(token_id)) for token_id in token_ids])
    for _ in range(MAX_TOKENS):
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits[: vocabulary.vocab_size])
        assert allowed.size, "there is always a next token"
        ends = allowed[is_end[allowed]]
        token_id = int(rng.choice(ends if ends.size and rng.random() < 0.3 else allowed))
        if token_id in vocabulary.eos_tokens:
            return text.decode(), True
        assert matcher.consume_token(token_id), matcher.get_error()
        text += tokenizer.token_bytes(token_id)
    return text.decode(errors="replace"), False


def read(tokenizer: Tokenizer, text: str, tools=TOOLS, *, is_reasoning=False):
    reader = tokenizer.chat_format.reader(tools, is_reasoning=is_reasoning)
    events = reader.push(text) + reader.finish()
    calls = []
    for event in events:
        if isinstance(event, CallBegun):
            calls.append([event.name, ""])
        elif isinstance(event, Arguments):
            calls[-1][1] += event.text
    content = "".join(event.text for event in events if isinstance(event, Content))
    return calls, content, "".join(event.text for event in events if isinstance(event, Reasoning))


def check_calls(calls):
    for name, arguments in calls:
        if name == "go":
            assert json.loads(arguments) == {}
        else:
            VALIDATOR.validate(json.loads(arguments))


TEMPLATES = {name: text + "{{ tools }}" for name, text in SIGNS.items()} | {"none": "{{ messages }}"}


@pytest.fixture(scope="module", params=[True, False], ids=["tokens", "text"])
def made(request):
    """Tokenizers and vocabularies by template, which take a while to make."""
    found = {}

    def make(template):
        if template not in found:
            tokenizer = tokenizer_of(template, has_tokens=request.param)
            found[template] = tokenizer, tokens_of(tokenizer, [1])
        return found[template]

    return make


@pytest.mark.slow
@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_that_must_be_made(made, name):
    tokenizer, vocabulary = made(TEMPLATES[name])
    num_ended = 0
    for is_parallel in (True, False):
        wish = AnswerWish(tools=TOOLS, must_call=True, is_parallel=is_parallel)
        grammar = answer_grammar(tokenizer, wish, is_reasoning=False)
        for seed in range(8):
            text, has_ended = write(tokenizer, vocabulary, grammar, seed)
            if has_ended:
                calls, content, _ = read(tokenizer, text)
                assert 1 <= len(calls) <= (100 if is_parallel else 1), text
                assert not content.strip(), text
                check_calls(calls)
                num_ended += 1
    assert num_ended >= 3


@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_that_may_be_made(made, name):
    """Text is free; where it has calls, these are as they have to be."""
    tokenizer, vocabulary = made(TEMPLATES[name])
    grammar = answer_grammar(tokenizer, AnswerWish(tools=TOOLS[:1]), is_reasoning=False)
    syntax = tokenizer.chat_format.syntax
    for text in (syntax.text_head + "Just text.", syntax.text_head + "<tool {"):
        matcher = LLMatcher(vocabulary, grammar)
        assert matcher.consume_tokens(tokenizer.encode(text, add_special_tokens=False)), (text, matcher.get_error())
        assert matcher.is_accepting(), text
    head = syntax.before + syntax.write(LarkWriter((), lambda text: None), TOOLS[0]).head
    other = head.replace("look", "fly")
    for begun, is_right in ((head, True), (other, False)):
        matcher = LLMatcher(vocabulary, grammar)
        tokens = tokenizer.encode(begun, add_special_tokens=False)
        assert (matcher.try_consume_tokens(tokens) == len(tokens)) is is_right, begun


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hermes", "harmony"])
def test_a_form_or_calls(made, name):
    tokenizer, vocabulary = made(TEMPLATES[name])
    wish = AnswerWish(form=JsonForm({"enum": [1, 2]}), tools=TOOLS)
    grammar = answer_grammar(tokenizer, wish, is_reasoning=False)
    kinds = set()
    for seed in range(30):
        text, has_ended = write(tokenizer, vocabulary, grammar, seed)
        if has_ended:
            calls, content, _ = read(tokenizer, text)
            assert bool(calls) != (content in ("1", "2")), text
            check_calls(calls)
            kinds.add(bool(calls))
    assert kinds == {True, False}


THINKS = "{{ content.split('</think>') }}{% if tools %}<tool_call></tool_call>{% endif %}"


def test_reasoning_comes_before_the_form(made):
    tokenizer, vocabulary = made(THINKS)
    wish = AnswerWish(form=ChoiceForm(["yes", "no"]))
    for is_reasoning, texts in (
        (True, ["Hm </b>.</think>\n\nyes", "</think>no"]),
        (False, ["<think>Hm.\n</think>\nno", "yes"]),
    ):
        grammar = answer_grammar(tokenizer, wish, is_reasoning=is_reasoning)
        for text in texts:
            matcher = LLMatcher(vocabulary, grammar)
            assert matcher.consume_tokens(tokenizer.encode(text, add_special_tokens=False)), text
            assert matcher.is_accepting()
            _, content, _ = read(tokenizer, text, (), is_reasoning=is_reasoning)
            assert content in ("yes", "no")
        assert LLMatcher(vocabulary, grammar).try_consume_tokens(tokenizer.encode("yes", add_special_tokens=False))
        assert not LLMatcher(vocabulary, grammar).is_accepting()


def test_reasoning_within_a_budget():
    tokenizer = tokenizer_of(THINKS, has_tokens=True)
    vocabulary = tokens_of(tokenizer, [1])
    grammar = answer_grammar(tokenizer, AnswerWish(max_reasoning_tokens=5), is_reasoning=True)
    tokens = tokenizer.encode("a b c d e f g h", add_special_tokens=False)
    end = tokenizer.added_id("</think>")
    matcher = LLMatcher(vocabulary, grammar)
    assert matcher.try_consume_tokens(tokens) == 5
    assert matcher.consume_tokens([end, *tokens * 3]), "the answer is free"
    early = LLMatcher(vocabulary, grammar)
    assert early.consume_tokens([tokens[0], end, *tokens])


def test_a_budget_that_cannot_be_kept():
    tokenizer = tokenizer_of(THINKS, has_tokens=False)
    assert not can_limit_reasoning(tokenizer)
    with pytest.raises(RequestError, match="reason") as caught:
        answer_grammar(tokenizer, AnswerWish(max_reasoning_tokens=5), is_reasoning=False)
    assert caught.value.param == "thinking_token_budget"


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "glm4", "gemma4"])
def test_texts_have_as_many_characters_as_they_must(made, name):
    tokenizer, vocabulary = made(TEMPLATES[name])
    schema = {
        "type": "object",
        "properties": {
            "some": {"type": "string", "minLength": 2, "maxLength": 4},
            "few": {"type": "string", "maxLength": 3},
            "many": {"type": "string", "minLength": 5, "maxLength": 20, "format": "markdown"},
        },
        "required": ["some", "few", "many"],
        "additionalProperties": False,
    }
    validator, tool = jsonschema.Draft202012Validator(schema), Tool("look", None, schema)
    grammar = answer_grammar(tokenizer, AnswerWish(tools=[tool], must_call=True), is_reasoning=False)
    num_calls = 0
    for seed in range(20):
        text, has_ended = write(tokenizer, vocabulary, grammar, seed)
        for _, arguments in read(tokenizer, text, (tool,))[0] if has_ended else ():
            validator.validate(json.loads(arguments))
            num_calls += 1
    assert num_calls >= 3


@pytest.mark.parametrize("lengths", [{"minLength": 3, "maxLength": 2}, {"maxLength": "x"}, {"minLength": -1}])
def test_lengths_that_no_text_has(lengths):
    tokenizer = tokenizer_of(TEMPLATES["qwen3_coder"], has_tokens=False)
    tool = Tool("look", None, {"properties": {"q": {"type": "string", **lengths}}}, True)
    with pytest.raises(RequestError, match="minLength or maxLength of the argument 'q' cannot be enforced"):
        answer_grammar(tokenizer, AnswerWish(tools=[tool], must_call=True), is_reasoning=False)


@pytest.mark.parametrize("name", ["qwen3_coder", "glm4"])
@pytest.mark.parametrize(
    ("schema", "values"),
    [
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"12345": "12345", "null": None, '"a"': '"a"'}),
        ({"anyOf": [{"$ref": "#/$defs/level"}, {"type": "null"}]}, {'"1"': "1", "null": None, "1": ...}),
        ({"$ref": "#/$defs/level"}, {"1": "1", "2": "2", "3": ...}),
        ({"anyOf": [{"type": "string", "minLength": 2}, {"type": "null"}]}, {'"12"': "12", "null": None, '"1"': ...}),
        ({"const": "7"}, {"7": "7", '"7"': ...}),
        ({"allOf": [{"enum": ["a", 7]}, {"type": "string"}]}, {"a": "a", "7": ...}),
    ],
)
def test_plain_values_are_written_as_they_are_read(name, schema, values):
    """A value of `...` is one that must not be written."""
    tokenizer = tokenizer_of(TEMPLATES[name], has_tokens=False)
    described = {"properties": {"q": schema}, "required": ["q"]}
    shared = {"$defs": {"level": SCHEMA["$defs"]["level"]}}
    for whole in (described | shared, {"$ref": "#/$defs/root", "$defs": {"root": described, **shared["$defs"]}}):
        tool = Tool("look", None, whole, True)
        grammar = answer_grammar(tokenizer, AnswerWish(tools=[tool], must_call=True), is_reasoning=False)
        for text, value in values.items():
            matcher = LLMatcher(tokens_of(tokenizer, [1]), grammar)
            call = CALL_OF_Q[name].replace("VALUE", text)
            tokens = tokenizer.encode(call, add_special_tokens=False)
            is_written = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
            assert is_written is (value is not ...), (text, matcher.get_error())
            if is_written:
                assert json.loads(read(tokenizer, call, (tool,))[0][0][1]) == {"q": value}


PLAIN = {
    "qwen3_coder": (
        "<tool_call>\n<function=look>\n",
        "<parameter={}>\n{}\n</parameter>\n",
        "</function>\n</tool_call>",
    ),
    "glm4": ("<tool_call>look\n", "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n", "</tool_call>"),
    "gemma4": ("<|tool_call>call:look{{", '{}:<|"|>{}<|"|>', "}}<tool_call|>"),
    "functiongemma": ("<start_function_call>call:look{{", "{}:<escape>{}<escape>", "}}<end_function_call>"),
}


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize(
    ("parameters", "pairs", "is_written"),
    [
        ({"type": "object"}, {}, True),
        ({}, {"q": "fox"}, True),
        ({"type": "object"}, {"q": "fox", "other": "a\nb"}, True),
        ({"type": "object", "properties": {}}, {"q": "fox"}, False),
        ({"type": "object", "additionalProperties": False}, {"q": "fox"}, False),
        (None, {"q": "fox"}, False),
        ({"type": "object", "properties": {"q": {"type": "string", "minLength": 1}}}, {"q": "fox"}, True),
        ({"type": "object", "properties": {"q": {"type": "string", "format": "uri"}}}, {"other": "fox"}, False),
    ],
)
def test_plain_values_of_tools_that_are_not_strict(made, name, parameters, pairs, is_written):
    tokenizer, vocabulary = made(TEMPLATES[name])
    tool = Tool("look", None, parameters)
    grammar = answer_grammar(tokenizer, AnswerWish(tools=[tool], must_call=True), is_reasoning=False)
    head, pair, tail = PLAIN[name]
    between = "," if "gemma" in name else ""
    call = head.format() + between.join(pair.format(*one) for one in pairs.items()) + tail.format()
    matcher = LLMatcher(vocabulary, grammar)
    tokens = tokenizer.encode(call, add_special_tokens=False)
    is_consumed = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
    assert is_consumed is is_written, matcher.get_error()
    if is_written:
        ((called, arguments),), _, _ = read(tokenizer, call, (tool,))
        assert (called, json.loads(arguments)) == ("look", pairs)


CALL_OF_Q = {
    "qwen3_coder": "<tool_call>\n<function=look>\n<parameter=q>\nVALUE\n</parameter>\n</function>\n</tool_call>",
    "glm4": "<tool_call>look\n<arg_key>q</arg_key>\n<arg_value>VALUE</arg_value>\n</tool_call>",
}


def test_text_whose_form_the_syntax_cannot_hold():
    tokenizer = tokenizer_of(TEMPLATES["qwen3_coder"], has_tokens=False)
    tool = Tool("look", None, {"properties": {"q": {"type": "string", "pattern": "^a$"}}}, True)
    with pytest.raises(RequestError, match="arguments of 'look': pattern of the argument 'q' cannot"):
        answer_grammar(tokenizer, AnswerWish(tools=[tool], must_call=True), is_reasoning=False)


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"properties": {"a": {}}, "anyOf": [{"required": ["a"]}, {"maxProperties": 0}]}, "anyOf"),
        ({"properties": {"a": {}}, "dependentRequired": {"a": ["b"]}}, "allOf"),
        ({"properties": {"a": {}}, "minProperties": 1}, "minProperties"),
        ({"properties": {"a": {}}, "patternProperties": {"^a": {"type": "null"}}}, "patternProperties"),
        ({"properties": {"a": {}}, "propertyNames": {"maxLength": 0}}, "propertyNames"),
        ({"properties": {"a": {}}, "required": ["b"]}, "required"),
    ],
)
@pytest.mark.parametrize("name", ["qwen3_coder", "glm4"])
def test_what_plain_arguments_cannot_hold_together(name, schema, keyword):
    tokenizer = tokenizer_of(TEMPLATES[name], has_tokens=False)
    strict = AnswerWish(tools=[Tool("look", None, schema, is_strict=True)])
    with pytest.raises(RequestError, match=f"arguments of 'look': {keyword} cannot be enforced"):
        answer_grammar(tokenizer, strict, is_reasoning=False)
    answer_grammar(tokenizer, AnswerWish(tools=[Tool("look", None, schema)]), is_reasoning=False)


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "glm4"])
def test_references_lead_through_the_whole_schema(made, name):
    tokenizer, vocabulary = made(TEMPLATES[name])
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "array", "items": {"enum": [1, 2]}},
            "b": {"$ref": "#/properties/a/items"},
            "c": {"type": "array", "items": {"$ref": "#"}},
            "d": False,
        },
        "additionalProperties": False,
    }
    validator, tool = jsonschema.Draft202012Validator(schema), Tool("look", None, schema)
    grammar = answer_grammar(tokenizer, AnswerWish(tools=[tool], must_call=True), is_reasoning=False)
    seen = set()
    for seed in range(40):
        text, has_ended = write(tokenizer, vocabulary, grammar, seed)
        if has_ended:
            for _, arguments in read(tokenizer, text, (tool,))[0]:
                validator.validate(json.loads(arguments))
                seen |= json.loads(arguments).keys()
    assert seen == {"a", "b", "c"}


def test_arguments_that_repeat_large_definitions_are_refused():
    """In syntaxes that write each argument apart, each one needs the definitions."""
    definitions = {"word": {"enum": ["y" * 100_000]}}
    properties = {f"a{number}": {"$ref": "#/$defs/word"} for number in range(300)}
    tool = Tool("t", None, {"type": "object", "properties": properties, "$defs": definitions}, is_strict=True)
    tokenizer = tokenizer_of(TEMPLATES["qwen3_coder"], has_tokens=True)
    with pytest.raises(RequestError, match="the arguments of 't': the schemas take more than") as caught:
        answer_grammar(tokenizer, AnswerWish(tools=[tool], must_call=True), is_reasoning=False)
    assert caught.value.param == "tools"
