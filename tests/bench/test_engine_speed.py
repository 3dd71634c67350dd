"""Timing an engine, over the fake model and a clock that only passes move."""

from __future__ import annotations

import pytest

from moeflow.bench.engine_speed import Case, Stopwatch
from moeflow.core.errors import EngineError
from tests.bench.example_costs import SHAPE, cost
from tests.engine.fake_runner import make_engine

PASS_S = 0.5


def make_stopwatch(**changes):
    """An engine whose every pass takes half a second."""
    engine, runner = make_engine(**{"max_num_batched_tokens": 16, "num_blocks": 64, **changes})
    return Stopwatch(engine, seed=0, clock=lambda: len(runner.batches) * PASS_S), engine, runner


def test_decode_counts_only_passes_of_the_whole_batch():
    stopwatch, engine, runner = make_stopwatch()
    case = Case(batch_size=4, prompt_len=7, new_tokens=5)
    assert stopwatch.measure(case, 0) == pytest.approx(4 * 5 / (5 * PASS_S))
    timed = runner.batches[-5:]
    assert all(batch.num_tokens == 4 and all(entry.samples for entry in batch.entries) for batch in timed)
    assert len(runner.batches) > 5  # the prompts were computed before
    assert not engine.has_work
    engine.check_integrity()


def test_prefill_counts_every_chunk_up_to_the_first_token():
    stopwatch, engine, runner = make_stopwatch()
    assert stopwatch.measure(Case(1, 40, 0), 0) == pytest.approx(40 / (3 * PASS_S))
    assert [batch.num_tokens for batch in runner.batches] == [16, 16, 8]
    assert not engine.has_work


def test_prompts_are_the_same_for_a_seed_and_new_for_every_repetition():
    stopwatch, _, runner = make_stopwatch()
    case = Case(1, 12, 0)
    for repetition in (0, 0, 1):
        stopwatch.measure(case, repetition)
    first, again, other = (batch.entries[0].request.prompt_token_ids for batch in runner.batches)
    assert first == again != other


def test_a_failing_pass_is_an_error_and_leaves_nothing_behind():
    stopwatch, engine, runner = make_stopwatch()
    runner.fail_next = ValueError("boom")
    with pytest.raises(EngineError, match="boom"):
        stopwatch.measure(Case(2, 4, 3), 0)
    assert not engine.has_work


def test_a_request_set_back_spoils_the_measurement():
    stopwatch, _, _ = make_stopwatch(num_blocks=12)
    with pytest.raises(EngineError, match="--kv-cache"):
        stopwatch.measure(Case(4, 7, 30), 0)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (Case(5, 4, 2), "4 requests together at most: raise --max-num-seqs"),
        (Case(1, 48, 0), "allows 48"),
        (Case(4, 16, 8), "holds 96: raise --kv-cache"),
    ],
)
def test_what_the_engine_cannot_run_is_said_before(case, reason):
    stopwatch, _, _ = make_stopwatch(num_blocks=24)
    assert reason in (stopwatch.why_not(case) or "")
    assert stopwatch.why_not(Case(4, 7, 5)) is None


def test_a_case_counts_its_passes_and_positions():
    """Two rows, prompts of 4, 3 passes: the passes see 4 + 1, 4 + 2 and 4 + 3 positions a row."""
    case = Case(2, 4, 3)
    total = case.cost(SHAPE, weight_bits=16, embedding_bits=16, kv_bytes_per_token=48)
    passes = [cost(num_tokens=2, num_sampled=2, num_seen=2 * (4 + n)) for n in (1, 2, 3)]
    assert total.num_bytes == pytest.approx(sum(each.num_bytes for each in passes))
    assert total.num_flops == pytest.approx(sum(each.num_flops for each in passes))
    prefill = Case(1, 8, 0).cost(SHAPE, weight_bits=16, embedding_bits=16, kv_bytes_per_token=48)
    assert prefill.num_flops == pytest.approx(cost(num_tokens=8, num_seen=36, kv_bytes_per_token=0).num_flops)


def test_rows_have_names():
    assert [Case(8, 32, 16).name, Case(1, 512, 0).name] == ["decode, batch 8", "prefill 512"]
