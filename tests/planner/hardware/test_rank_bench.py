"""What ranks pay is measured by two of them, kept with the machine, and measured only once."""

from __future__ import annotations

import dataclasses

import pytest

from moeflow.core.errors import ConfigError, GroupError
from moeflow.core.hardware import RANK, REMOTE_RANK
from moeflow.kernels.cpu import extension
from moeflow.planner.hardware import rank_bench
from moeflow.planner.hardware.hardware_json import machine_from_json, machine_to_json
from moeflow.planner.hardware.rank_bench import SIZES, RankTimes, measure_ranks, with_ranks
from tests.planner.examples import machine

TIMES = RankTimes([(256, 1e-5), (1 << 20, 1e-3)], [(256, 1e-4), (1 << 20, 1e-2)], [("expert", "tensor", 3e-4)])


@pytest.mark.slow
@pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
def test_two_ranks_measure_links_and_layers():
    times = measure_ranks()
    assert [size for size, _ in times.shared_memory] == [size for size, _ in times.tcp] == list(SIZES)
    assert all(seconds > 0 for _, seconds in (*times.shared_memory, *times.tcp))
    assert times.tcp[-1][1] > times.shared_memory[-1][1]  # each byte is copied more often, and hashed
    assert len({layouts for *layouts, _ in map(tuple, times.layers) for layouts in [tuple(layouts)]}) == 4


def test_a_machine_keeps_what_was_measured_and_is_not_measured_again(monkeypatch):
    asked = []
    monkeypatch.setattr(rank_bench, "measure_ranks", lambda: asked.append("ranks") or TIMES)
    found = with_ranks(machine(ram=10**10), lambda _: None)
    assert found.link(RANK, RANK).seconds(256) == pytest.approx(1e-5)
    assert found.link(RANK, REMOTE_RANK).seconds(1 << 20) == pytest.approx(1e-2)
    processor = found.compute_level.processor
    assert processor.rank_layer_s("expert", "tensor") == 3e-4
    assert processor.rank_layer_s("sliced", "tensor") > 0  # as is usual
    kept = machine_from_json(machine_to_json(found), "kept")
    assert kept == found
    assert with_ranks(kept, lambda _: None) == found
    assert asked == ["ranks"]


def test_what_cannot_be_measured_is_as_usual(monkeypatch):
    def fail():
        raise GroupError("gone")

    monkeypatch.setattr(rank_bench, "measure_ranks", fail)
    assert with_ranks(machine(ram=10**10), lambda _: None) == machine(ram=10**10)


def test_links_of_ranks_lead_to_ranks():
    made = TIMES.added_to(machine(ram=10**10))
    link = dataclasses.replace(made.links[-1], target="ram")
    with pytest.raises(ConfigError, match="'rank' with 'rank' or 'remote rank'"):
        machine_from_json(machine_to_json(dataclasses.replace(made, links=(*made.links, link))), "bad")
