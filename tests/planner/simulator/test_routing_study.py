from __future__ import annotations

import numpy as np
import pytest

from moeflow.core.errors import ConfigError
from moeflow.planner.costs.model_costs import expected_distinct
from moeflow.planner.costs.routing_profile import SHARES_ON_DISK
from moeflow.planner.simulator.routing_study import study_routing, study_trace
from moeflow.workload.routing_trace import RoutedPass, RoutingTrace, TraceHeader

HEADER = TraceHeader(identity="x", num_layers=3, num_experts=8, top_k=2, slab_bytes=4096)


def trace(*passes):
    return RoutingTrace(HEADER, [RoutedPass(ids, generated, 0.1) for ids, generated in passes], 0)


def even_ids(num_tokens, seed=0):
    """Return choices that no token knows anything of: [layers, tokens, K]."""
    scores = np.random.default_rng(seed).random((HEADER.num_layers, num_tokens, HEADER.num_experts))
    return np.argsort(scores, axis=-1)[:, :, : HEADER.top_k]


@pytest.mark.slow
def test_even_routing_misses_about_what_is_on_disk():
    profile = study_routing(even_ids(640), HEADER)
    for batch in (1, 4):
        assert profile.decode_distinct(batch) == pytest.approx(1, abs=0.05)
        for on_disk in SHARES_ON_DISK:
            assert profile.decode_misses(batch).misses(on_disk) == pytest.approx(on_disk, abs=0.12)


def test_experts_that_all_tokens_choose_are_read_once():
    ids = np.broadcast_to(np.array([[0, 1], [1, 2], [2, 3]])[:, None, :], (3, 400, 2))
    profile = study_routing(ids, HEADER)
    assert profile.num_tokens == 400
    for size in (1, 4, 16, 64):
        even = expected_distinct(8, 2, size)
        assert profile.decode_distinct(size) == pytest.approx(2 / even)
        assert profile.decode_misses(size).misses(0.7) == pytest.approx(0, abs=1e-9)
    assert profile.prefill_distinct(128) == pytest.approx(2 / expected_distinct(8, 2, 128))
    assert profile.prefill_misses(128).misses(0.7) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("factor", [1, 10])
def test_popular_experts_of_one_half_of_a_text_are_counted_in_the_other(factor):
    rng = np.random.default_rng(1)
    weights = np.array([1, 1, 1, 1, factor, factor, factor, factor], dtype=float)
    ids = np.array([[rng.choice(8, 2, False, weights / weights.sum()) for _ in range(1000)] for _ in range(3)])
    profile = study_routing(ids, HEADER)
    rare = (ids[:, 500:] < 4).mean()
    assert profile.cold_choices.misses(0.5) == pytest.approx(rare if factor > 1 else 0.5, abs=0.03)
    assert profile.cold_choices.misses(0) == 0
    assert profile.cold_choices.misses(1) == 1


def test_with_nearly_no_room_all_that_is_used_is_read():
    ids = np.arange(400)[None, :, None] * 2 % 8 + np.arange(2) + np.zeros((3, 1, 1), dtype=np.int64)
    profile = study_routing(ids, HEADER)  # each token uses two that the one before did not
    assert profile.decode_misses(1).misses(0.9) == pytest.approx(1, abs=0.1)


def test_progress_is_told_up_to_the_end():
    told = []
    study_routing(even_ids(80), HEADER, lambda done, total: told.append((done, total)))
    assert told == [(number, len(told)) for number in range(1, len(told) + 1)]


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 5, 7, 16])
def test_a_text_of_a_few_tokens_tells_what_it_can(num_tokens):
    profile = study_routing(even_ids(num_tokens), HEADER)
    assert all(0 <= read <= 1.2 for it in (*profile.decode, *profile.prefill) for read in it.reads)


def test_recorded_passes_are_told_apart_by_kind_and_size():
    prompt = (even_ids(30), 1)
    steps = [(even_ids(3, seed), 3) for seed in range(20)]
    profile = study_trace(trace(prompt, *steps))
    assert [it.num_tokens for it in profile.decode] == [4]  # the power of two next to three
    assert [it.num_tokens for it in profile.prefill] == [32]
    assert profile.num_tokens == 90
    assert profile.prefill[0].distinct == pytest.approx(8 / expected_distinct(8, 2, 30), abs=0.02)
    used = sum(len(np.unique(layer)) for ids, _ in steps for layer in ids)
    assert profile.decode[0].distinct == pytest.approx(used / (20 * 3 * expected_distinct(8, 2, 3)))


def test_reads_grow_with_what_is_on_disk():
    profile = study_trace(trace(*[(even_ids(2, seed), 2) for seed in range(60)]))
    reads = profile.decode[0].reads
    assert list(reads) == sorted(reads)
    assert reads[0] < 0.25 < 0.75 < reads[-1]


def test_a_trace_without_passes_is_refused():
    with pytest.raises(ConfigError, match="no pass"):
        study_trace(trace())
