"""Lark grammars as regular expressions: Python's own engine reads them, and models are held to them in every syntax."""

from __future__ import annotations

import json
import random
import re
import tracemalloc

import pytest
from llguidance import LLMatcher, LLTokenizer

from moeflow.engine.constraints.grammar_tokens import tokens_of
from moeflow.text.answer_form.answer_grammar import AnswerWish, answer_grammar
from moeflow.text.answer_form.lark_pattern import enforceable, pattern_of
from moeflow.text.tool_syntax.tool import Tool
from tests.text.answer_form.test_answer_grammar import TEMPLATES, read, tokenizer_of, write

PATCH = r"""
start: begin hunk+ end  // a comment
begin: "*** Begin" LF
end: "*** End" LF?
hunk: "@ " NAME [MODE] LF change*
  | "- " NAME LF
?change.2: ("+" | "-") /[a-z"\\\/ü]{0,3}/ LF -> line
MODE: " " ("rw"i | "x" ~ 2..3)
NAME: LETTER ("a".."c" | DIGIT)*
%import common.LF
%import common (LETTER, DIGIT)
"""
RIGHT = (
    "*** Begin\n@ a\n*** End",
    '*** Begin\n@ Zb1 RW\n+"\\/\n-ü\n@ b xx\n- c\n*** End\n',
)
WRONG = ("", "*** Begin\n*** End", "*** Begin\n@ a\n+abcd\n*** End", "*** Begin\n@ a x\n*** End", "*** Begin\n@ a1d\n")


def test_the_texts_of_a_grammar():
    pattern = pattern_of(PATCH)
    for text in RIGHT:
        assert re.fullmatch(pattern, text), text
    for text in WRONG:
        assert not re.fullmatch(pattern, text), text


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "a" start | "b"',
        'start: a\na: "(" b ")"\nb: a?',
        "start: A\nA: /a(?=b)/",
        "start: A\nA: /^a$/",
        "start: MISSING",
        'start: "a"\n%ignore " "',
        "start: A\n%import python.A",
        'start: "a',
        "start: ((",
        "start: A++\nA: /a/",
        "",
        "\n".join(["start: " + "a0 " * 9, *(f"a{n}: {f'a{n + 1} ' * 9}" for n in range(9)), 'a9: "x"']),
    ],
)
def test_what_is_not_converted(grammar):
    assert pattern_of(grammar) is None


def test_regular_expressions_of_a_whole_text():
    assert enforceable("^[a-z]+$") == "[a-z]+"
    assert enforceable(r"[^x]\$") == r"[^x]\$"
    assert enforceable(r"a\b") is None
    assert enforceable("(?<!a)b") is None
    assert enforceable(r"\\b[]$^\]][^]$](?:a)") == r"\\b[]$^\]][^]$](?:a)"
    for pattern in (r"[\b]", "[a", "a\\", r"(a)\1", "(?>a)", "a|^b", "[a]$]"):
        assert enforceable(pattern) is None, pattern


@pytest.mark.parametrize("use", ["A* ", "A|"])
def test_a_long_grammar_takes_little_memory(use):
    """Each use of a name repeats its pattern."""
    grammar = f'A: "{"b" * 30_000}"\nstart: {use * 5_000}A'
    tracemalloc.start()
    try:
        assert pattern_of(grammar) is None
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 20 * 2**20


def test_long_texts_take_little_time():
    many = 4 * 2**20
    assert enforceable(f"[{'$' * many}]") is not None
    assert enforceable("$" * many) is None
    assert enforceable("[" * many) is None
    assert pattern_of('start: "a"' + "+" * many) is None


def test_llguidance_reads_the_grammar_in_the_same_way():
    """An oracle for the conversion: its own parser of Lark, on texts that are cut and changed at random."""
    vocabulary = LLTokenizer("byte")
    rng, pattern = random.Random(1), pattern_of(PATCH)
    plain = PATCH.replace("  // a comment", "").replace("?change.2", "change").replace(" -> line", "")
    num_right = 0
    for _ in range(300):
        text = rng.choice(RIGHT)
        place = rng.randrange(len(text) + 1)
        text = text[:place] + rng.choice(["", "a", "\n", "+", "x"]) + text[place + rng.choice([0, 0, 1]) :]
        matcher = LLMatcher(vocabulary, plain, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        tokens = list(text.encode())
        is_right = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
        assert is_right == bool(re.fullmatch(pattern, text)), text
        num_right += is_right
    assert num_right > 50


@pytest.mark.parametrize("has_tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_models_are_held_to_a_pattern(name, has_tokens):
    """In JSON with its escapes, and in syntaxes that have plain text."""
    tokenizer = tokenizer_of(TEMPLATES[name], has_tokens=has_tokens)
    vocabulary = tokens_of(tokenizer, [1])
    parameters = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    pattern = r'[+][a-b"\\\n]{1,4}(?:!|/)'
    tool = Tool("edit", None, {**parameters, "additionalProperties": False}, True, {"input": pattern})
    grammar = answer_grammar(tokenizer, AnswerWish(tools=[tool], must_call=True, is_parallel=False), is_reasoning=False)
    inputs = set()
    for seed in range(12):
        text, has_ended = write(tokenizer, vocabulary, grammar, seed)
        if has_ended:
            ((called, arguments),), _, _ = read(tokenizer, text, [tool])
            assert called == "edit"
            given = json.loads(arguments)["input"]
            assert re.fullmatch(pattern, given), text
            inputs.add(given)
    assert len(inputs) > 3
    assert "pattern" not in json.dumps(tool.as_json())
