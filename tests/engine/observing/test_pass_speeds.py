"""Sums of passes: their work, their time, and the first tokens among them."""

from __future__ import annotations

from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest

from moeflow.core.batch import BatchEntry
from moeflow.core.engine_config import EngineConfig
from moeflow.core.observation import SpeedQuestion, SpeedSight
from moeflow.core.request import Request
from moeflow.core.sampling_params import SamplingParams
from moeflow.engine.engine import Engine
from moeflow.engine.observing.observed_pass import ObservedPass
from moeflow.engine.observing.pass_speeds import PassSpeeds
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings
from tests.engine.submissions import run, submission
from tests.tiny_mixtral import write_tiny_mixtral


def request(name="a", num_prompt=4, *, submitted_s=0.0, queued_s=0.0):
    made = Request(name, list(range(2, 2 + num_prompt)), SamplingParams(), max_tokens=9)
    made.submitted_s, made.queued_s = submitted_s, queued_s
    return made


def entry(owner, start, num_tokens, *, samples=True):
    return BatchEntry(owner, start, num_tokens, (), samples)


def one_pass(*entries, start_s, duration_s=1.0, ids=None, num_new=1, stall_s=0.0, read_bytes=0):
    brought = {it.request: SimpleNamespace(tokens=[0] * num_new, kept=[]) for it in entries if it.samples}
    return ObservedPass(
        entries=entries,
        sampled=brought,
        choices=[] if ids is None else [ids],
        num_rows=sum(it.num_rows for it in entries),
        start_s=start_s,
        duration_s=duration_s,
        stall_s=stall_s,
        read_bytes=read_bytes,
    )


def test_passes_of_one_size_add_up_second_by_second():
    speeds, owner = PassSpeeds(0.0, 4), request()
    speeds.note(one_pass(entry(owner, 5, 1), start_s=10.0, stall_s=0.5, read_bytes=7), 0.25, now_s=11.1)
    speeds.note(one_pass(entry(owner, 6, 1), start_s=11.1, num_new=2), 0.0, now_s=11.9)
    speeds.note(one_pass(entry(owner, 7, 1), start_s=12.5), 0.0, now_s=13.5)
    first, second = speeds.sight(14.0).groups
    assert (first.num_tokens, first.num_sampled, first.num_sequences) == (1, 1, 1)
    assert (first.num_passes, first.num_generated) == (2, 3)
    assert (first.num_seen, first.num_read) == (6 + 7, 6 + 7)
    assert (first.stall_s, first.waited_s, first.read_bytes) == (0.5, 0.25, 7)
    assert first.age_s == pytest.approx(14.0 - 11.9)
    assert (second.num_passes, second.num_seen) == (1, 8)


def test_a_pass_lasts_from_the_end_of_the_one_before_unless_there_was_no_work():
    speeds, owner = PassSpeeds(0.0, 4), request()
    speeds.note(one_pass(entry(owner, 5, 1), start_s=10.0), 0.0, now_s=11.0)
    speeds.note(one_pass(entry(owner, 6, 1), start_s=11.5), 0.0, now_s=12.0)
    speeds.rest()
    speeds.note(one_pass(entry(owner, 7, 1), start_s=20.0), 0.0, now_s=21.0)
    assert [it.seconds for it in speeds.sight(21.0).groups] == [1.0, 1.5, 1.0]


def test_rows_of_a_prompt_see_those_before_them():
    speeds, owner = PassSpeeds(0.0, 4), request(num_prompt=10)
    speeds.note(one_pass(entry(owner, 2, 3, samples=False), start_s=0.0), 0.0, now_s=1.0)
    (found,) = speeds.sight(1.0).groups
    assert found.num_seen == 3 + 4 + 5  # positions 2, 3 and 4, each with itself
    assert (found.num_read, found.num_sampled, found.num_tokens) == (5, 0, 3)


def test_distinct_experts_are_counted_layer_by_layer():
    speeds, owner = PassSpeeds(0.0, 4), request()
    ids = np.array([[[0, 1], [1, 2]], [[3, 0], [3, 0]]])  # three experts in the first layer, two in the second
    speeds.note(one_pass(entry(owner, 0, 2), start_s=0.0, ids=ids), 0.0, now_s=1.0)
    speeds.note(one_pass(entry(owner, 2, 2), start_s=1.0), 0.0, now_s=1.5)
    (found,) = speeds.sight(2.0).groups
    assert (found.distinct, found.num_counted, found.num_passes) == (2.5, 1, 2)


def test_first_tokens_are_told_with_what_was_computed_and_whether_others_shared_a_pass():
    speeds = PassSpeeds(0.0, 4)
    alone = request("alone", 6, submitted_s=1.0, queued_s=0.5)
    alone.num_cached_tokens = 2
    speeds.note(one_pass(entry(alone, 2, 2, samples=False), start_s=1.5), 0.0, now_s=2.5)
    speeds.note(one_pass(entry(alone, 4, 2), start_s=2.5), 0.0, now_s=3.5)
    first, second = request("first", 2, submitted_s=4.0), request("second", 3, submitted_s=4.0)
    speeds.note(one_pass(entry(first, 0, 2), entry(second, 0, 2, samples=False), start_s=4.0), 0.0, now_s=5.0)
    speeds.note(one_pass(entry(second, 2, 1), start_s=5.0), 0.0, now_s=6.0)
    found = speeds.sight(10.0).first_tokens
    assert [(it.num_prompt_tokens, it.num_computed_tokens, it.seconds, it.was_alone, it.age_s) for it in found] == [
        (6, 4, 2.0, True, 6.5),
        (2, 2, 1.0, False, 5.0),
        (3, 3, 2.0, False, 4.0),
    ]


def test_what_is_older_than_a_minute_is_forgotten():
    speeds = PassSpeeds(0.0, 4)
    speeds.note(one_pass(entry(request(), 0, 4), start_s=0.0), 0.0, now_s=1.0)
    assert len(speeds.sight(60.0).groups) == len(speeds.sight(60.0).first_tokens) == 1
    seen = speeds.sight(62.1)
    assert (seen.groups, seen.first_tokens) == ([], [])


def test_an_engine_counts_its_passes_while_somebody_asks(tmp_path):
    write_tiny_mixtral(tmp_path)
    config = resolve(Settings(model=str(tmp_path), num_threads=1, kv_cache_bytes=1 << 20)).config
    assert isinstance(config, EngineConfig)
    with closing(Engine.load(config)) as engine:
        engine.submit(submission("unseen", [5, 6], max_tokens=3))
        run(engine)
        assert engine.look(SpeedQuestion()).groups == []
        engine.submit(submission("seen", [7, 8, 9, 10, 11], max_tokens=4, ignore_eos=True))
        run(engine)
        sight = engine.look(SpeedQuestion())
    assert isinstance(sight, SpeedSight)
    prompts = [it for it in sight.groups if it.num_tokens == 5]
    decoding = [it for it in sight.groups if it.num_tokens == 1]
    assert sum(it.num_passes for it in prompts) == 1
    assert sum(it.num_passes for it in decoding) == 3
    assert sum(it.num_generated for it in sight.groups) == 4
    assert sum(it.num_seen for it in decoding) == 6 + 7 + 8
    assert sum(it.distinct for it in decoding) == 3 * 2  # each token has two experts
    assert all(it.num_counted == it.num_passes and it.seconds > 0 for it in sight.groups)
    assert [(it.num_prompt_tokens, it.was_alone) for it in sight.first_tokens] == [(5, True)]
