"""Ranks compute halves of passes where the forecast gains by it."""

from __future__ import annotations

import dataclasses

import pytest

from moeflow.core.errors import ConfigError
from moeflow.core.model_config import EncoderConfig
from moeflow.core.parallel_config import ParallelConfig
from moeflow.planner.choices.rank_schedule_choice import LEAST_GAIN, with_schedule
from moeflow.planner.costs.rank_costs import Sharing
from moeflow.settings.settings import Settings
from tests.planner.costs.test_rank_costs import where
from tests.planner.examples import small_model
from tests.shapes import TINY

SPREAD = ParallelConfig(num_ranks=2, is_spread=True, moves_experts=False)
WITH_ENCODER = dataclasses.replace(TINY, encoder=EncoderConfig(num_layers=2, decoder_start_token_id=0))


def chosen(parallel, rate=1e8, schedule="auto", has_model=True, shape=TINY, **more):
    model = small_model(where(bytes_per_s=rate), sharing=Sharing(parallel=parallel), overlap=0.0, chunk_tokens=2048)
    reasons = []
    settings = Settings(model="m", num_ranks=2, rank_schedule=schedule, **more)
    found = with_schedule(parallel, settings, shape, model if has_model else None, reasons)
    assert dataclasses.replace(found, alternating_tokens=0) == parallel
    assert bool(reasons) == bool(found.alternating_tokens)
    return found.alternating_tokens, model.ranked_layers


def test_the_fewest_tokens_whose_halves_gain_are_found():
    tokens, layers = chosen(SPREAD)
    sizes = [2**power for power in range(1, 12)]
    gains = {size: layers.gain_of_halves(size) for size in sizes}
    assert tokens == min(size for size, gain in gains.items() if gain >= LEAST_GAIN)
    assert min(gains.values()) < LEAST_GAIN  # a few tokens stay together


@pytest.mark.parametrize(
    ("parallel", "more", "tokens"),
    [
        (SPREAD, {"rate": 1e30}, 0),  # no waits
        (SPREAD, {"schedule": "synchronous"}, 0),
        (SPREAD, {"schedule": "asynchronous", "rate": 1e30}, 2),
        (SPREAD, {"has_model": False}, 0),
        (dataclasses.replace(SPREAD, is_spread=False), {}, 0),
        (dataclasses.replace(SPREAD, is_spread=False), {"schedule": "asynchronous"}, 2),
    ],
)
def test_other_ranks_compute_all_tokens_at_once_unless_asked(parallel, more, tokens):
    assert chosen(parallel, **more)[0] == tokens


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        ({"capacity_factor": 1.0}, "--capacity-factor.*whole passes.*remove one"),
        ({"shape": WITH_ENCODER}, "an encoder, whose inputs are computed whole"),
    ],
)
def test_passes_that_cannot_be_cut_stay_whole(more, complaint):
    assert chosen(SPREAD, **more)[0] == 0
    with pytest.raises(ConfigError, match=complaint):
        chosen(SPREAD, schedule="asynchronous", **more)
