"""The form of an answer holds with drafts, preemption, another engine and cancellation."""

from __future__ import annotations

import json

import msgspec
import pytest

from moeflow.core.engine_config import EngineConfig
from moeflow.core.request import FinishReason
from moeflow.engine.engine import Engine
from moeflow.text.answer_form.answer_grammar import plain_grammar
from moeflow.text.answer_form.form import JsonForm
from moeflow.text.tokenizer import Tokenizer
from tests.engine.submissions import run, submission
from tests.engine.test_speculation import Drafts, load
from tests.tiny_mixtral import write_tiny_mixtral

SCHEMA = {
    "type": "object",
    "properties": {
        "words": {"type": "array", "items": {"type": "string", "maxLength": 6}, "minItems": 4, "maxItems": 6},
        "count": {"type": "integer"},
    },
    "required": ["words", "count"],
    "additionalProperties": False,
}
SIGNS = {byte: 4.0 for byte in (4, 14, 62, 94, 96)}  # that end things; see `write_byte_tokenizer`
FORM = plain_grammar(JsonForm(SCHEMA))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_mixtral(folder)
    return folder


def jobs(**sampling):
    return [
        submission(
            f"r{i}", [5 + i, *range(20, 20 + 30 * i)], max_tokens=90, temperature=1.0, logit_bias=SIGNS, **sampling
        )
        for i in range(5)
    ]


def answers(engine: Engine, submissions):
    for one in submissions:
        engine.submit(one)
    found = run(engine)
    engine.check_integrity()
    return {name: [token for output in outputs for token in output.token_ids] for name, outputs in found.items()}


@pytest.fixture(scope="module")
def expected(tiny):
    engine = load(tiny)
    try:
        return answers(engine, jobs(grammar=FORM))
    finally:
        engine.close()


def test_drafts_change_nothing(tiny, expected):
    """Correct drafts, wrong drafts, and drafts that the form forbids."""
    engine = load(tiny)
    engine._speculation = drafts = Drafts(expected)
    try:
        assert answers(engine, jobs(grammar=FORM)) == expected
        assert drafts.counts.kept > 20
        assert drafts.counts.drafted > drafts.counts.kept
    finally:
        engine.close()


def test_preemption_changes_nothing(tiny, expected):
    engine = load(tiny, num_blocks=26)
    try:
        assert answers(engine, jobs(grammar=FORM)) == expected
        assert engine.stats().preemptions_total > 0
    finally:
        engine.close()


def test_another_engine_goes_on(tiny, expected):
    engine = load(tiny)
    try:
        cut = {name: tokens[: len(tokens) // 2] for name, tokens in expected.items()}
        rest = answers(engine, [_with(one, generated_token_ids=cut[one.request_id]) for one in jobs(grammar=FORM)])
        assert {name: cut[name] + tokens for name, tokens in rest.items()} == expected
    finally:
        engine.close()


def _with(one, **changes):
    return msgspec.structs.replace(one, **changes)


def test_a_request_is_cancelled_while_its_form_is_understood(tiny):
    engine = load(tiny)
    try:
        big = plain_grammar(JsonForm({"enum": [f"value {i}" for i in range(20_000)]}))
        engine.submit(submission("slow", [5], grammar=big, max_tokens=3))
        engine.submit(submission("other", [6], max_tokens=3))
        engine.cancel(["slow"])
        engine.check_integrity()
        found = run(engine)
        assert found["slow"][-1].finish_reason is FinishReason.CANCELLED
        assert found["other"][-1].finish_reason is FinishReason.LENGTH
    finally:
        engine.close()


def test_the_answers_are_json(tiny, expected):
    tokenizer = Tokenizer.load(tiny)
    whole = [tokens for tokens in expected.values() if tokens[-1] == 1]
    assert whole
    for tokens in whole:
        assert 4 <= len(json.loads(tokenizer.decode(tokens[:-1]))["words"]) <= 6


@pytest.mark.parametrize("memory_bytes", [0, 2**40])
def test_nothing_is_loaded_ahead_within_a_limit_of_memory(tiny, monkeypatch, memory_bytes):
    engine = load(tiny)
    asked = []
    try:
        monkeypatch.setattr(engine._constraints, "load_ahead", lambda: asked.append(True))
        monkeypatch.setattr(EngineConfig, "memory_bytes", memory_bytes)
        engine.load_ahead()
        assert asked == ([] if memory_bytes else [True])
    finally:
        engine.close()
