"""Real processes, once: all layouts, the bytes sent against the simulator's counts, and a lost rank."""

from __future__ import annotations

import os
import signal

import pytest

from moeflow.core.errors import GroupError
from moeflow.kernels.cpu import extension
from moeflow.parallel.placement.layouts import LAYOUTS
from studies.parallel.meter import SECTIONS
from studies.parallel.prediction import predict
from studies.parallel.rank import Task
from studies.parallel.rank_processes import RankProcesses
from studies.parallel.run import ParallelStudy
from tests.planner.examples import machine
from tests.studies.parallel.cases import case, shape

pytestmark = [
    pytest.mark.thorough,  # processes that import torch
    pytest.mark.skipif(not extension.is_available(), reason="needs the CPU extension"),
]

MEASURED = tuple(name for name in LAYOUTS if name != "replicated")
CASE = case(shape(num_ranks=2, top_k=2), num_tokens=(12, 11), capacity_factor=0.5)


@pytest.fixture(scope="module")
def ranks():
    with RankProcesses(CASE.layer) as processes:
        yield processes


@pytest.mark.parametrize("name", MEASURED)
def test_ranks_measure_compute_what_one_process_does_and_send_what_is_predicted(ranks, name):
    runs = ranks.run(Task(CASE, name, is_checked=True))
    cost = predict(CASE, machine(ram=10**10), [name], ranks.measure_rates())[name]
    loads = 8 if name == "capacity-dropless" else 0  # a number that each tells the other
    assert [run.sent_bytes - loads for run in runs] == cost.sent_bytes.tolist()
    assert sum(run.num_dropped for run in runs) == cost.num_dropped
    assert (cost.num_dropped > 0) == (name == "capacity")
    for run in runs:
        assert tuple(run.seconds) == SECTIONS
        assert run.wall_s > max(run.seconds.values()) > 0
        assert run.error < 1e-5
        assert run.is_equal or name == "sliced"
    assert ranks.run(Task(CASE, name, is_checked=False))[0].is_equal is None


def test_a_study_gives_a_record_of_every_case_and_starts_other_ranks_for_another_layer():
    said, passes = [], []
    study = ParallelStudy(layouts=("capacity-dropless", "sliced"), repeats=2, machine=machine(ram=10**10))
    cases = [CASE, case(CASE.layer, router_skew=0.0), case(shape(num_ranks=1))]
    results = list(study.run(cases, lambda: passes.append(1), said.append))
    assert len(passes) == study.num_passes(cases) == 18
    assert [one["router_skew"] for one in results] == [0.6, 0.0, 0.6]
    assert said.count("packing 5 of 5 experts") == 2
    assert "5 experts, skew 0, 7 tokens a rank" in said
    for of, one in zip(cases, results, strict=True):
        assert list(one["layouts"]) == ["capacity-dropless", "sliced"]
        for fields in one["layouts"].values():
            assert [len(ranks_of) for ranks_of in fields["seconds"]] == [of.layer.num_ranks] * 2
            assert len(fields["wall_s"]) == 2
            assert len(fields["predicted_s"]) == of.layer.num_ranks


def test_a_rank_that_is_gone_is_an_error(ranks):
    """The last here: it ends the ranks."""
    os.kill(ranks._ranks.processes[1].pid, signal.SIGKILL)
    with pytest.raises(GroupError, match=r"process \d of the study is gone"):
        ranks.run(Task(CASE, "sliced", is_checked=False))
