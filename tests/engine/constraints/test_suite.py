"""JSON Schema's own test suite: answers are never forbidden by schemas, and unenforced keywords are refused by name."""

from __future__ import annotations

import functools
import json
import re
import sys
from contextlib import closing
from pathlib import Path

import jsonschema_rs
import pytest
from llguidance import LLMatcher

from moeflow.core.errors import RequestError
from moeflow.core.request import FinishReason
from moeflow.engine.constraints.checker import GrammarChecker
from moeflow.engine.constraints.grammar_tokens import tokens_of
from moeflow.engine.constraints.limits import LIMITS
from moeflow.text.answer_form.answer_grammar import plain_grammar
from moeflow.text.answer_form.form import JsonForm
from tests.engine.constraints.test_schemas import answers, llm  # noqa: F401  # a fixture

SUITE = Path(__file__).parents[2] / "data" / "json_schema_test_suite" / "draft2020-12.jsonl"
GROUPS = [json.loads(line) for line in SUITE.read_text().splitlines()]
KNOWN = {("ECMA 262 \\S matches everything but whitespace", '"\ufeff"')}  # which is no whitespace in Unicode
TOO_LONG = re.compile(r"[0-9.]{16}|[eE]")  # numbers that a validator that computes in doubles may misjudge
HELD_TO = [
    "additionalProperties",
    "allOf",
    "anyOf",
    "const",
    "dependentRequired",
    "dependentSchemas",
    "enum",
    "exclusiveMaximum",
    "exclusiveMinimum",
    "items",
    "maxItems",
    "maxLength",
    "maxProperties",
    "maximum",
    "minItems",
    "minLength",
    "minimum",
    "multipleOf",
    "pattern",
    "patternProperties",
    "prefixItems",
    "properties",
    "propertyNames",
    "ref",
    "required",
    "type",
]
UNSUPPORTED = [
    "$dynamicAnchor",
    "$dynamicRef",
    "contains",
    "else",
    "if",
    "maxContains",
    "minContains",
    "not",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
    "uniqueItems",
]
REASONS = "|".join(
    (
        r"answers cannot be held to these keywords of a schema, leave them out: \[",
        r"Unknown format: \w",
        r"a oneOf with schemas that may hold at once is not supported",
        r"Unsatisfiable schema: \w",
        r"\$ref leads elsewhere: resource '.*' is not present",
        r"Expected positive integer for '\w",
        r"minProperties 4 cannot be enforced",
        r"multipleOf' has too many digits",
        r"regex for float range",
        r"regexes .* are not disjoint",
        r"a pattern cannot be read: \w",
    )
)


@functools.cache
def compiled(llm):  # noqa: F811
    """Return the groups whose schemas are accepted, with what follows them, and why the others are not."""
    accepted, refused = [], []
    with closing(GrammarChecker(llm.tokenizer, llm.model.eos_token_ids)) as checker:
        for group in GROUPS:
            try:
                accepted.append((group, checker.check(plain_grammar(JsonForm(group["schema"])))))
            except RequestError as error:
                refused.append((group, str(error)))
    return accepted, refused


def test_what_is_refused_is_named(llm):  # noqa: F811
    _, refused = compiled(llm)
    for group, reason in refused:
        assert re.search(REASONS, reason), (group, reason)


@pytest.fixture(scope="module")
def vocabulary(llm):  # noqa: F811
    return tokens_of(llm.tokenizer, [1])


def takes(matcher, tokenizer, text: str) -> bool:
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


def test_nothing_that_a_schema_forbids_is_taken(llm, vocabulary):  # noqa: F811
    accepted, _ = compiled(llm)
    num_valid = num_taken = 0
    for group, grammar in accepted:
        matcher = LLMatcher(vocabulary, grammar, limits=LIMITS)
        for test in group["tests"]:
            texts = {json.dumps(test["data"], ensure_ascii=is_ascii) for is_ascii in (True, False)}
            for text in texts:
                is_taken = takes(matcher.deep_copy(), llm.tokenizer, text)
                is_known = (group["description"], text) in KNOWN
                assert test["valid"] or is_taken == is_known, (group["description"], test["description"], text)
            num_valid += test["valid"]
            num_taken += test["valid"] and is_taken
    assert num_taken > 0.85 * num_valid


@pytest.mark.parametrize("name", ["a", "é", 'a"b', "a\n", "a\\"])
@pytest.mark.parametrize("kind", ["properties", "patternProperties"])
def test_a_free_name_is_none_of_the_schemas_spelt_with_escapes(llm, vocabulary, name, kind):  # noqa: F811
    key = name if kind == "properties" else f"^{re.escape(name)}$"
    grammar = plain_grammar(JsonForm({"type": "object", kind: {key: {"type": "integer"}}}))
    matcher = LLMatcher(vocabulary, grammar, limits=LIMITS)
    escaped = "".join(f"\\u{ord(char):04x}" for char in name)
    for spelt in (escaped, escaped.upper().replace("U", "u"), json.dumps(name)[1:-1]):
        assert not takes(matcher.deep_copy(), llm.tokenizer, f'{{"{spelt}": "x"}}')
    assert takes(matcher.deep_copy(), llm.tokenizer, f'{{{json.dumps(name, ensure_ascii=False)}: 1, "other": "x"}}')


def test_most_schemas_of_supported_keywords_are_accepted(llm):  # noqa: F811
    accepted, refused = compiled(llm)
    assert len(accepted) >= 235
    assert {group["file"] for group, _ in accepted} >= {f"{keyword}.json" for keyword in HELD_TO}
    for keyword in UNSUPPORTED:
        assert any(f'"{keyword}"' in reason for _, reason in refused)


def finite(number: str) -> float:
    """Read a number as near as a double comes, since JSON has no largest one."""
    return max(min(float(number), sys.float_info.max), -sys.float_info.max)


@pytest.mark.slow
def test_answers_of_a_random_model_are_valid(llm):  # noqa: F811
    accepted, _ = compiled(llm)
    num_whole = 0
    outputs = answers(llm, [grammar for _, grammar in accepted], n=2, max_tokens=150)
    for (group, _), found in zip(accepted, outputs, strict=True):
        validator = jsonschema_rs.Draft202012Validator(group["schema"], validate_formats=True)
        for output in found:
            assert output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH), (group, output.error)
            is_exact = "multipleOf" not in str(group["schema"]) or not TOO_LONG.search(output.text)
            if output.finish_reason is FinishReason.STOP and is_exact:
                assert validator.is_valid(json.loads(output.text, parse_float=finite)), (group["schema"], output.text)
                num_whole += 1
    assert num_whole > 1.6 * len(accepted)
