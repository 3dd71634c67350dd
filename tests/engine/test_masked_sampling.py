"""A mask that takes long delays its own request alone, and changes no token of any."""

from __future__ import annotations

from concurrent.futures import Future
from threading import Event
from types import SimpleNamespace

import pytest

from moeflow.core.request import FinishReason, RequestStatus
from moeflow.engine import masked_sampling
from moeflow.engine.engine import Engine
from moeflow.text.answer_form.answer_grammar import plain_grammar
from moeflow.text.answer_form.form import JsonForm
from tests.engine.submissions import run, submission, tokens
from tests.engine.test_speculation import Drafts, load
from tests.tiny_mixtral import write_tiny_mixtral

FORM = plain_grammar(JsonForm({"type": "array", "items": {"type": "string", "maxLength": 5}, "minItems": 4}))
PLACE = 3  # tokens of the answer before the mask that is held back
PATIENCE_S = 60.0  # of a test
MANY = 2_000  # steps


class HeldBack:
    """A constraint whose mask at one place does not come before it may."""

    def __init__(self, inner) -> None:
        self._inner = inner
        self.is_slow = False
        self.is_computing, self.may_end = Event(), Event()

    def masks(self, token_ids, paths):
        if len(token_ids) >= PLACE and not self.may_end.is_set():
            self.is_computing.set()
            assert self.may_end.wait(PATIENCE_S)
        return self._inner.masks(token_ids, paths)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_mixtral(folder)
    return folder


@pytest.fixture
def engine(tiny):
    engine = load(tiny)
    yield engine
    engine.close()


def jobs():
    signs = {byte: 4.0 for byte in (4, 14, 62, 94, 96)}  # that end things; see `write_byte_tokenizer`
    formed = [
        submission(name, [5, 6, 7], max_tokens=30, temperature=1.0, logit_bias=signs, grammar=FORM)
        for name in ("held", "formed")
    ]
    return [*formed, submission("free", [8, 9], max_tokens=30, temperature=1.0)]


def submit(engine: Engine, *, is_slow: bool = False) -> HeldBack:
    """Submit all jobs, and hold the first one back."""
    for job in jobs():
        engine.submit(job)
    request = engine._requests["held"]
    compiled = engine._waiting_for_form[request].result(PATIENCE_S)
    held = HeldBack(compiled.constraint())
    held.is_slow = is_slow
    engine._waiting_for_form[request] = found = Future()
    found.set_result(SimpleNamespace(constraint=lambda: held))
    return held


def step_until(engine: Engine, outputs, is_over) -> None:
    for _ in range(MANY):
        if is_over():
            return
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        engine.check_integrity()
    pytest.fail("it does not come to that")


def is_finished(outputs, *names):
    return lambda: all(name in outputs and outputs[name][-1].finish_reason is not None for name in names)


@pytest.fixture(scope="module")
def expected(tiny):
    engine = load(tiny)
    for job in jobs():
        engine.submit(job)
    try:
        return {name: tokens(found) for name, found in run(engine).items()}
    finally:
        engine.close()


def rest(engine: Engine, outputs):
    for name, found in run(engine).items():
        outputs.setdefault(name, []).extend(found)
    return {name: tokens(found) for name, found in outputs.items()}


@pytest.mark.parametrize("is_slow", [False, True])
def test_others_go_on_meanwhile_and_the_answers_are_the_same(engine, expected, is_slow):
    held, outputs = submit(engine, is_slow=is_slow), {}
    step_until(engine, outputs, is_finished(outputs, "formed", "free"))
    assert held.is_computing.is_set()
    assert tokens(outputs["held"]) == expected["held"][:PLACE]
    held.may_end.set()
    assert rest(engine, outputs) == expected
    assert engine.stats().generated_tokens_total == sum(map(len, expected.values()))


def test_it_may_be_preempted_meanwhile(engine, expected):
    held, outputs = submit(engine), {}
    step_until(engine, outputs, lambda: held.is_computing.is_set() and len(tokens(outputs["free"])) > PLACE + 2)
    request = engine._requests["held"]
    engine._scheduler._send_back(request)
    step_until(engine, outputs, lambda: request.status is RequestStatus.RUNNING and not request.num_uncomputed_tokens)
    held.may_end.set()
    assert rest(engine, outputs) == expected


def test_its_mask_may_come_while_it_is_preempted(engine, expected):
    held, outputs = submit(engine), {}
    step_until(engine, outputs, lambda: held.is_computing.is_set() and len(tokens(outputs["free"])) > PLACE + 2)
    request = engine._requests["held"]
    engine._scheduler._send_back(request)
    held.may_end.set()
    engine._runner._sampling._jobs[request].masks.result(PATIENCE_S)
    assert rest(engine, outputs) == expected


def test_it_may_be_cancelled_meanwhile(engine, expected):
    held, outputs = submit(engine), {}
    step_until(engine, outputs, lambda: held.is_computing.is_set() and len(tokens(outputs["free"])) > PLACE + 2)
    engine.cancel(["held"])
    held.may_end.set()
    found = rest(engine, outputs)
    assert outputs["held"][-1].finish_reason is FinishReason.CANCELLED
    assert {**found, "held": expected["held"]} == expected
    sampling = engine._runner._sampling
    sampling.begin([])
    assert not sampling._jobs
    assert not sampling._waited_s


def test_drafts_go_on_for_others(engine, expected):
    engine._speculation = drafts = Drafts(expected)
    asked, trees = [], drafts.trees
    drafts.trees = lambda running, max_tokens: asked.extend(running) or trees(running, max_tokens)
    held, outputs = submit(engine), {}
    step_until(engine, outputs, lambda: held.is_computing.is_set())
    drafted = drafts.counts.drafted
    step_until(engine, outputs, iter([False, True]).__next__)  # its pass ends
    asked.clear()
    step_until(engine, outputs, is_finished(outputs, "formed", "free"))
    assert drafts.counts.drafted > drafted
    assert {request.request_id for request in asked} == {"formed", "free"}  # speculation needs all to decode
    held.may_end.set()
    assert rest(engine, outputs) == expected


def test_it_fails_alone_when_patience_ends(engine, expected, monkeypatch):
    held, outputs = submit(engine), {}
    step_until(engine, outputs, is_finished(outputs, "formed", "free"))
    monkeypatch.setattr(masked_sampling, "PATIENCE_S", 0.0)
    step_until(engine, outputs, is_finished(outputs, "held"))
    held.may_end.set()
    last = outputs["held"][-1]
    assert last.finish_reason is FinishReason.ERROR
    assert last.blames_request
    assert "simplify the form" in last.error
    assert tokens(outputs["free"]) == expected["free"]
    assert not engine.has_work


class Panic(BaseException):
    """As llguidance raises it."""


@pytest.mark.parametrize("error", [ValueError("broken"), Panic("broken")])
def test_a_mask_that_cannot_be_computed_fails_its_request_alone(engine, expected, error):
    def fail(token_ids, paths):
        raise error

    held = submit(engine)
    held.masks = fail
    outputs = run(engine)
    assert outputs["held"][-1].finish_reason is FinishReason.ERROR
    assert "cannot be followed" in outputs["held"][-1].error
    for name in ("formed", "free"):
        assert tokens(outputs[name]) == expected[name]
