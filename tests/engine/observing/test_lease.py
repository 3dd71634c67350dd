"""An engine observes while somebody looks, and runs as ever before and afterwards."""

from __future__ import annotations

import gc
import weakref
from contextlib import closing

import pytest

from moeflow.core.observation import LEASE_S, ExpertQuestion, TokenQuestion, Watch
from moeflow.engine.engine import Engine
from moeflow.engine.observing import observer
from moeflow.engine.observing.expert_counts import MINUTE_S
from moeflow.engine.observing.routing_tap import RoutingTap
from moeflow.kernels.cpu.decoder import PackedDecoder
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings
from tests.engine.observing.observed_runs import answers_of, check_sums
from tests.engine.submissions import submission
from tests.tiny_mixtral import write_tiny_mixtral

JOBS = [submission("one", [5, 6, 7], max_tokens=5), submission("two", [8] * 20, max_tokens=5)]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_mixtral(folder)
    return resolve(Settings(model=str(folder), num_threads=1, kv_cache_bytes=2**20)).config


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch):
    """The clock of observers."""
    clock, made = Clock(), observer.Observer
    monkeypatch.setattr(observer, "Observer", lambda model: made(model, clock))
    return clock


@pytest.fixture
def asked(monkeypatch):
    """What each pass of the kernels kept."""
    kept: list[bool] = []
    begin = PackedDecoder.begin

    def noted(self, *arguments, keeps_choices, keeps_inputs):
        kept.append(keeps_choices or keeps_inputs)
        return begin(self, *arguments, keeps_choices=keeps_choices, keeps_inputs=keeps_inputs)

    monkeypatch.setattr(PackedDecoder, "begin", noted)
    return kept


def test_passes_keep_choices_only_while_somebody_looks(config, clock, asked, monkeypatch):
    taken: list[int] = []
    take = RoutingTap._take_whole

    def noted(self, topk_ids):
        taken.append(topk_ids.shape[1])
        take(self, topk_ids)

    monkeypatch.setattr(RoutingTap, "_take_whole", noted)
    with closing(Engine.load(config)) as engine:
        before = answers_of(engine, JOBS)
        assert asked
        assert not any(asked)
        assert taken == []

        asked.clear()
        engine.look(Watch())
        assert answers_of(engine, JOBS) == before
        assert all(asked)
        assert len(taken) == len(asked)

        clock.now_s += LEASE_S + 1
        engine.step()
        asked.clear()
        taken.clear()
        assert answers_of(engine, JOBS) == before
        assert not any(asked)
        assert taken == []


def test_the_end_of_the_lease_frees_what_was_seen(config, clock):
    with closing(Engine.load(config)) as engine:
        engine.look(Watch())
        blocks = [block for _, block in engine._runner.model.moe_blocks()]
        assert all(block.on_route is not None for block in blocks)
        answers_of(engine, JOBS)
        seen = weakref.ref(engine._observer)
        clock.now_s += LEASE_S  # the last moment
        engine.step()
        assert seen() is not None
        clock.now_s += 0.001
        engine.step()
        gc.collect()
        assert seen() is None
        assert all(block.on_route is None for block in blocks)
        assert engine._runner.model.packed_layers.on_choices is None


def test_each_question_renews_the_lease_and_counting_begins_anew_after_its_end(config, clock):
    with closing(Engine.load(config)) as engine:
        for question in (Watch(), ExpertQuestion(), TokenQuestion("one"), Watch()):
            engine.look(question)
            clock.now_s += LEASE_S - 1
            engine.step()
        assert engine.look(Watch()).observed_s == pytest.approx(4 * (LEASE_S - 1))
        answers_of(engine, JOBS)
        assert engine.look(ExpertQuestion()).total.tokens > 0
        clock.now_s += LEASE_S + 1
        engine.step()
        sight = engine.look(ExpertQuestion())
        assert (sight.total.tokens, sight.num_passes, sight.counted_s) == (0, 0, 0.0)


def test_the_last_minute_is_a_minute(config, clock):
    with closing(Engine.load(config)) as engine:
        engine.look(Watch())
        tokens_by_second = []
        for second in range(150):
            clock.now_s = 100.0 + second
            if second % 7 == 0:
                answers_of(engine, [submission("one", [5] * (second % 5 + 1), max_tokens=2)])
            tokens_by_second.append(second % 5 + 2 if second % 7 == 0 else 0)
            sight = engine.look(ExpertQuestion())
            check_sums(sight)
            assert sight.last_minute.tokens == sum(tokens_by_second[-60:])
            assert sight.total.tokens == sum(tokens_by_second)


def test_counts_of_earlier_minutes_are_not_kept_unasked(config, clock):
    with closing(Engine.load(config)) as engine:
        for second in range(0, 300, 2):
            clock.now_s = 100.0 + second
            engine.look(Watch())
            answers_of(engine, [submission("one", [5], max_tokens=1)])
        counts = engine._observer._counts
        assert counts.num_passes > 100
        assert len(counts._seconds) <= MINUTE_S
        assert engine.look(ExpertQuestion()).last_minute.tokens == 30


@pytest.mark.parametrize("method", ["begin_pass", "end_pass", "drop_pass", "rest"])
def test_an_error_of_the_observer_ends_no_request(config, monkeypatch, caplog, method):
    with closing(Engine.load(config)) as engine:
        before = answers_of(engine, JOBS)
        engine.look(Watch())

        def fail(*facts):
            raise ValueError("a bug")

        if method == "drop_pass":
            monkeypatch.setattr(engine._runner, "run", fail)
        monkeypatch.setattr(observer.Observer, method, fail)
        found = answers_of(engine, JOBS)
        assert (found == before) == (method != "drop_pass")
        assert "not observed" in caplog.text
        monkeypatch.undo()
        assert answers_of(engine, JOBS) == before
        assert engine.look(ExpertQuestion()).total.tokens == 0
        answers_of(engine, JOBS)
        assert engine.look(ExpertQuestion()).total.tokens > 0


def test_choices_outside_of_passes_are_not_taken(config):
    with closing(Engine.load(config)) as engine:
        engine.look(Watch())
        for _, block in engine._runner.model.moe_blocks():
            block.on_route("the choice of a draft", None)
        answers_of(engine, [submission("one", [5, 6], max_tokens=1)])
        for _, block in engine._runner.model.moe_blocks():
            block.on_route("the choice of a draft", None)
        assert engine.look(ExpertQuestion()).total.tokens == 2
