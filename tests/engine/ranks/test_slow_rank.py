"""A slow rank is found by the others' waiting times, shown, and named in the log once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from moeflow.core.engine_messages import ExpertStats
from moeflow.core.parallel_config import ParallelConfig
from moeflow.engine.ranks import rank_upkeep
from moeflow.engine.ranks.rank_upkeep import TIMES_PASSES, RankUpkeep
from moeflow.engine.ranks.slow_rank import slow_rank
from tests.shapes import TINY


@pytest.mark.parametrize(
    ("waited_shares", "expected"),
    [
        ([0.1, 0.1], None),
        ([0.1, 0.7], 0),
        ([0.7, 0.8, 0.1], 2),
        ([0.7, 0.1, 0.1], None),  # two are slow
        ([0.3, 0.7], None),  # a slow network, rather
        ([0.9, 0.9], None),
    ],
)
def test_it_is_the_one_that_waits_little_while_all_others_wait(waited_shares, expected):
    assert slow_rank(waited_shares) == expected


class Group:
    """Rank 0 of several, which wait and compute as long as a test says."""

    def __init__(self, size: int) -> None:
        self.rank, self.size = 0, size
        self.clock = SimpleNamespace(waited_s=0.0)
        self.of_others: list[list[float]] = []  # waited, and busy

    def all_gather(self, name: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor, *(torch.tensor([[*times, 0.0, 0.0, 0.0, 0.0]], dtype=tensor.dtype) for times in self.of_others)]


@pytest.mark.parametrize("has_own_sequences", [False, True])
def test_a_slow_rank_is_shown_as_long_as_it_is_and_named_once(monkeypatch, caplog, has_own_sequences):
    now_s = 100.0
    monkeypatch.setattr(rank_upkeep, "time", SimpleNamespace(perf_counter=lambda: now_s))
    group = Group(3)
    attention = "data" if has_own_sequences else "replicated"
    upkeep = RankUpkeep(group, TINY, ParallelConfig(num_ranks=3, expert_layout="sliced", attention_layout=attention))
    upkeep.group = group
    shown: list[list[bool]] = []
    waited_s = others_s = busy_s = 0.0
    for is_slow in (False, True, True, False, False):
        for _ in range(TIMES_PASSES):
            now_s += 50.0  # nobody asks anything
            with upkeep.computing():
                now_s += 0.1
                waited_s += 0.01
                others_s += 0.08 if is_slow else 0.01
                busy_s += 0.1
                group.clock.waited_s = others_s
                group.of_others = [[waited_s, busy_s - waited_s], [others_s, busy_s - others_s]]
        shown.append([rank.is_slow for rank in upkeep.add_stats(ExpertStats(), ["", "", ""]).ranks])
    if has_own_sequences:  # others wait for the rank with the longest ones
        assert (shown, caplog.records) == ([[False] * 3] * 5, [])
        return
    # It is reported with the first pass of the next ones.
    assert shown == [[False] * 3, [False] * 3, [False, True, False], [False, True, False], [False] * 3]
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.startswith("rank 1 is slow: the others waited for it in ")
