"""The static baseline in the real engine: same tokens, held back as long as it should, failures end the batch."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import pytest

from moeflow.core.engine_messages import EngineStats, TokenOutput
from moeflow.core.request import FinishReason
from moeflow.engine.engine import Engine
from moeflow.planner.resolve import resolve
from moeflow.processes.main import EngineProcess
from moeflow.settings.settings import Settings
from tests.engine.fake_runner import make_engine
from tests.engine.submissions import run, submission, tokens
from tests.scheduler.fake_model import generate_alone
from tests.tiny_mixtral import write_tiny_mixtral


def make_static_engine(**changes):
    return make_engine(**{"policy": "static", "batch_timeout_s": 0.0, "num_blocks": 64, **changes})


def test_tokens_are_those_of_a_solo_run_and_padding_stays_inside():
    engine, _ = make_static_engine()
    prompts = {"a": [1, 2, 3], "b": list(range(20)), "c": [9]}
    for name, prompt in prompts.items():
        engine.submit(submission(name, prompt))
    outputs = run(engine)
    assert outputs.keys() == prompts.keys()
    for name, prompt in prompts.items():
        assert tokens(outputs[name]) == generate_alone(prompt, 6)
    stats = engine.stats()
    assert (stats.prompt_tokens_total, stats.generated_tokens_total) == (24, 18)  # padding counts as neither


def test_a_failing_pass_ends_the_batch_and_the_next_one_runs():
    engine, runner = make_static_engine(max_num_seqs=2)
    for name in ("a", "b", "c"):
        engine.submit(submission(name, [1]))
    runner.fail_next = ValueError("boom")
    failed = engine.step()
    engine.check_integrity()
    assert {(o.request_id, o.finish_reason) for o in failed} == {("a", FinishReason.ERROR), ("b", FinishReason.ERROR)}
    assert tokens(run(engine)["c"]) == generate_alone([1], 6)


def test_a_step_computes_nothing_while_the_batch_may_still_fill():
    engine, runner = make_static_engine(batch_timeout_s=1000.0, max_num_seqs=2)
    engine.submit(submission("a", [1]))
    assert engine.step() == []
    assert (engine.has_work, len(runner.batches)) == (True, 0)
    assert 0 < engine.held_s <= 1000
    engine.cancel(["a"])
    assert engine.held_s == 0
    assert [o.finish_reason for o in engine.step()] == [FinishReason.CANCELLED]
    engine.submit(submission("b", [1]))
    engine.submit(submission("c", [2]))
    assert set(run(engine)) == {"b", "c"}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_mixtral(folder)
    return resolve(Settings(model=str(folder), num_threads=1, max_num_seqs=4, max_num_batched_tokens=64)).config


def static(config, **changes):
    return dataclasses.replace(
        config, scheduler=dataclasses.replace(config.scheduler, policy="static", **{"batch_timeout_s": 0.0, **changes})
    )


def test_both_policies_give_the_same_tokens_on_a_real_model(config):
    answers = []
    for each in (config, static(config)):
        engine = Engine.load(each)
        for index in range(6):
            prompt = [5 + (7 * index + i) % 200 for i in range(1 + 9 * (index % 3))]
            engine.submit(submission(str(index), prompt, max_tokens=2 + index, temperature=0.0))
        answers.append({name: tokens(outputs) for name, outputs in run(engine).items()})
    assert answers[0] == answers[1]


def test_the_process_waits_for_the_timeout_and_no_longer():
    """While a batch waits to fill, it waits for messages as long as the policy holds requests back."""
    socket = QuietSocket()
    engine = SimpleNamespace(has_work=True, held_s=0.4, stats=EngineStats, load_ahead=lambda: None)
    process = EngineProcess(socket, SimpleNamespace(end=lambda: None))

    def step() -> list[TokenOutput]:
        engine.has_work, process._deadline = False, math.inf
        return []

    engine.step = step
    process._serve(engine)
    assert socket.waits_ms == [400]


class QuietSocket:
    """Nobody sends anything."""

    def __init__(self) -> None:
        self.waits_ms: list[int] = []

    def poll(self, timeout_ms: int) -> int:
        self.waits_ms.append(timeout_ms)
        return 0

    def send(self, message: bytes) -> None:
        pass
