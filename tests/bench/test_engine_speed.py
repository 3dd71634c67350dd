"""Timing an engine, over the fake model and a clock that only passes move."""

from __future__ import annotations

import pytest

from moeflow.bench.engine_speed import SpeedCase, Stopwatch
from moeflow.core.errors import EngineError
from moeflow.planner.costs.model_costs import Formats, ModelCosts
from tests.engine.fake_runner import make_engine
from tests.shapes import TINY

PASS_S = 0.5


def make_stopwatch(**changes):
    """An engine whose every pass takes half a second."""
    engine, runner = make_engine(**{"max_num_batched_tokens": 16, "num_blocks": 64, **changes})
    return Stopwatch(engine, seed=0, clock=lambda: len(runner.batches) * PASS_S), engine, runner


def test_decode_counts_only_passes_of_the_whole_batch():
    stopwatch, engine, runner = make_stopwatch()
    case = SpeedCase(batch_size=4, prompt_len=7, new_tokens=5)
    assert stopwatch.measure(case, 0) == pytest.approx(4 * 5 / (5 * PASS_S))
    timed = runner.batches[-5:]
    assert all(batch.num_tokens == 4 and all(entry.samples for entry in batch.entries) for batch in timed)
    assert len(runner.batches) > 5  # the prompts were computed before
    assert not engine.has_work
    engine.check_integrity()


def test_prefill_counts_every_chunk_up_to_the_first_token():
    stopwatch, engine, runner = make_stopwatch()
    assert stopwatch.measure(SpeedCase(1, 40, 0), 0) == pytest.approx(40 / (3 * PASS_S))
    assert [batch.num_tokens for batch in runner.batches] == [16, 16, 8]
    assert not engine.has_work


def test_prompts_are_the_same_for_a_seed_and_new_for_every_repetition():
    stopwatch, _, runner = make_stopwatch()
    case = SpeedCase(1, 12, 0)
    for repetition in (0, 0, 1):
        stopwatch.measure(case, repetition)
    first, again, other = (batch.entries[0].request.prompt_token_ids for batch in runner.batches)
    assert first == again != other


def test_a_failing_pass_is_an_error_and_leaves_nothing_behind():
    stopwatch, engine, runner = make_stopwatch()
    runner.fail_next = ValueError("boom")
    with pytest.raises(EngineError, match="boom"):
        stopwatch.measure(SpeedCase(2, 4, 3), 0)
    assert not engine.has_work


def test_a_request_set_back_spoils_the_measurement():
    stopwatch, _, _ = make_stopwatch(num_blocks=12)
    with pytest.raises(EngineError, match="--kv-cache"):
        stopwatch.measure(SpeedCase(4, 7, 30), 0)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (SpeedCase(5, 4, 2), "4 requests together at most: raise --max-num-seqs"),
        (SpeedCase(1, 48, 0), "allows 48"),
        (SpeedCase(4, 16, 8), "holds 96: raise --kv-cache"),
    ],
)
def test_what_the_engine_cannot_run_is_said_before(case, reason):
    stopwatch, _, _ = make_stopwatch(num_blocks=24)
    assert reason in (stopwatch.why_not(case) or "")
    assert stopwatch.why_not(SpeedCase(4, 7, 5)) is None


def test_a_case_counts_its_passes_and_positions():
    """Two rows, prompts of 4, 3 passes: the passes see 4 + 1, 4 + 2 and 4 + 3 positions a row."""
    shape = TINY.with_fields(
        vocab_size=100,
        hidden_size=8,
        num_layers=3,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        intermediate_size=16,
        num_experts=4,
        top_k=2,
        dense_layers=(1,),
        dense_intermediate_size=32,
    )
    costs = ModelCosts(shape, Formats(matrices="bfloat16", embeddings="bfloat16", kv="bfloat16"))
    attention, expert, router, dense, head = 8 * 8 + 2 * 8 * 4 + 8 * 8, 3 * 8 * 16, 8 * 4, 3 * 8 * 32, 100 * 8
    num_bytes, num_flops = SpeedCase(2, 4, 3).cost(costs)
    distinct = 4 * (1 - (1 - 2 / 4) ** 2)
    read = 2 * (3 * attention + 2 * (router + distinct * expert) + dense) + head * 2
    assert num_bytes == pytest.approx(3 * read + 2 * (5 + 6 + 7) * 3 * 2 * 4 * 2)
    active = 3 * attention + 2 * (router + 2 * expert) + dense + head
    assert num_flops == pytest.approx(3 * 2 * 2 * active + 3 * 4 * 2 * 4 * 2 * (5 + 6 + 7))
    num_bytes, num_flops = SpeedCase(1, 8, 0).cost(costs)
    assert num_flops == pytest.approx(2 * (8 * (active - head) + head) + 3 * 4 * 2 * 4 * 36)
    all_experts = 4 * (1 - (1 - 2 / 4) ** 8)
    assert num_bytes == pytest.approx(2 * (3 * attention + 2 * (router + all_experts * expert) + dense + head))


def test_rows_have_names():
    assert [SpeedCase(8, 32, 16).name, SpeedCase(1, 512, 0).name] == ["decode, batch 8", "prefill 512"]
