"""Each rank tells the spans of its part of passes when somebody asks, with its waits for the others."""

from __future__ import annotations

import msgspec
import pytest

from moeflow.core.observation import TimelineQuestion
from moeflow.engine.engine import Engine
from moeflow.kernels.cpu import extension
from moeflow.pipeline.runtime.recording import Recording
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings
from tests.engine.streamed_runs import answers
from tests.tiny_mixtral import write_tiny_mixtral

pytestmark = [pytest.mark.skipif(not extension.is_available(), reason=extension.why_not()), pytest.mark.slow]
PROMPTS = [[5, 9, 200, 31, 7], [100]]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_mixtral(folder, hidden_size=128, num_local_experts=6, num_hidden_layers=2)
    return str(folder)


def config_of(model, **settings):
    return resolve(Settings(model=model, kv_cache_bytes=2**22, num_threads=2, **settings)).config


def look(engine) -> Recording:
    return msgspec.msgpack.decode(engine.look(TimelineQuestion(64)).recording, type=Recording)


def spans(recording, name):
    return sorted(
        (it for row in recording.to_trace().rows if row.name == name for it in row.spans), key=lambda it: it[1]
    )


@pytest.mark.parametrize("settings", [{}, {"stages": "1,1"}], ids=["parts of layers", "stages"])
def test_every_rank_tells_its_part_of_each_pass(model, settings):
    """Processes of one machine share a clock, so a rank's part lies within the time of the whole pass."""
    alone = Engine.load(config_of(model))
    want = answers(alone, PROMPTS, num_tokens=6)
    alone.close()
    engine = Engine.load(config_of(model, num_ranks=2, **settings))
    try:
        assert [each.num_passes for each in look(engine).ranks] == [0]
        assert answers(engine, PROMPTS, num_tokens=6) == want, "recording changes no token"
        first = look(engine)
        (second,) = first.ranks
        passes, parts = spans(first, "passes"), spans(second, "passes")
        assert len(passes) == len(parts) == first.num_passes == second.num_passes
        assert parts[-1].label.name == "part of a pass of 2 tokens"
        assert abs(first.clock_ns - second.clock_ns) < 10**9
        for recording in (first, second):
            waits = spans(recording, "ranks")
            assert waits
            assert all(wait.is_blocked and wait.label.name.startswith("waits for other ranks: ") for wait in waits)
            own = spans(recording, "passes")
            for wait in waits:
                assert any(it.start_ns <= wait.start_ns and wait.end_ns <= it.end_ns for it in own)
        layers = [{it.label.layer for it in spans(each, "attention")} for each in (first, second)]
        assert layers == ([{0}, {1}] if "stages" in settings else [{0, 1}] * 2)
        engine._end_observing()
        answers(engine, PROMPTS, num_tokens=3)
        assert [each.num_passes for each in look(engine).ranks] == [0], "ranks have ended, too, and begin anew"
    finally:
        engine.close()
