"""Popularity: counts against a plain loop, and moves that are worth it only."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moeflow.core.errors import ConfigError
from moeflow.experts.hybrid.popularity import Move, Popularity
from moeflow.workload.routing_recorder import RoutingRecorder
from moeflow.workload.routing_trace import TraceHeader

LAYERS, EXPERTS, TOP_K = 3, 5, 2


def _choices(seed: int, num_tokens: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    return np.array([[random.permutation(EXPERTS)[:TOP_K] for _ in range(num_tokens)] for _ in range(LAYERS)], np.int64)


def test_counts_are_of_each_layer_and_fade() -> None:
    popularity, expected = Popularity(LAYERS, EXPERTS), np.zeros((LAYERS, EXPERTS))
    for seed, num_tokens in enumerate((1, 700, 3, 5000)):
        ids = _choices(seed, num_tokens)
        popularity.observe(ids)
        expected *= 0.5 ** (num_tokens / 4096)
        for layer in range(LAYERS):
            for expert in ids[layer].reshape(-1):
                expected[layer, expert] += 1
    np.testing.assert_allclose(popularity.counts, expected)
    for layer in range(LAYERS):
        most = popularity.most_chosen(layer, 2)
        assert sorted(expected[layer])[-2:] == [expected[layer, most[1]], expected[layer, most[0]]]


def _with_counts(counts: list[list[float]]) -> Popularity:
    popularity = Popularity(len(counts), len(counts[0]))
    popularity.counts[:] = counts
    return popularity


@pytest.mark.parametrize(
    ("on_gpu", "on_cpu", "moves"),
    [
        (100.0, 110.0, False),  # not worth a move
        (100.0, 130.0, False),  # chance: 2 standard deviations
        (100.0, 160.0, True),
        (0.0, 4.0, False),
        (0.0, 10.0, True),
        (1000.0, 1200.0, False),  # certain, but a small gain
    ],
)
def test_a_move_needs_a_factor_and_enough_choices(on_gpu: float, on_cpu: float, moves: bool) -> None:
    popularity = _with_counts([[on_gpu, on_cpu]])
    found = popularity.moves(np.array([[True, False]]), 2)
    assert found == ([Move(layer=0, leaving=0, coming=1)] if moves else [])


def test_the_largest_gains_come_first_and_each_layer_moves_its_extremes() -> None:
    popularity = _with_counts([[50, 9, 900, 80, 0], [50, 9, 90, 80, 0], [50, 9, 2000, 80, 0]])
    is_on_gpu = np.array([[True, True, False, False, False]] * LAYERS)
    assert popularity.moves(is_on_gpu, 2) == [Move(2, 1, 2), Move(0, 1, 2)]
    assert popularity.moves(np.ones_like(is_on_gpu), 2) == popularity.moves(np.zeros_like(is_on_gpu), 2) == []


def test_recorded_routing_is_the_start(tmp_path: Path) -> None:
    file, ids = tmp_path / "routing", _choices(0, 40)
    header = TraceHeader(identity="x", num_layers=LAYERS, num_experts=EXPERTS, top_k=TOP_K)
    recorder = RoutingRecorder(file, header)
    recorder.begin_pass(())
    for layer in ids:
        recorder.add_layer(layer)
    recorder.end_pass(num_generated=0, compute_s=0.0)
    recorder.close()
    popularity, expected = Popularity(LAYERS, EXPERTS), Popularity(LAYERS, EXPERTS)
    popularity.read(file)
    expected.observe(ids)
    np.testing.assert_array_equal(popularity.counts, expected.counts)
    with pytest.raises(ConfigError, match="3 layers with 5 experts, and the model has 3 with 6"):
        Popularity(LAYERS, EXPERTS + 1).read(file)
