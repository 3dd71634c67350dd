"""Tokens have the CPU's experts on the GPU in software, and an unobserved pass starts no further kernel."""

from __future__ import annotations

import pytest

from tests.soft_gpu.test_families import printed_by


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", pytest.param("gemma4", marks=pytest.mark.thorough)])
def test_replayed_graphs_report_the_choices_of_their_routers(family):
    found = printed_by("run_observed", (family,))[family]
    assert set(found) == {"graphs", "eager", "hybrid"}
    for way, seen in found.items():
        assert seen["tokens"], way
        assert seen["experts"], way
        assert seen["is_whole"], way
        assert seen["not_counted"] == "", way
    number = sum(found["graphs"]["places"].values())
    assert found["graphs"]["places"]["gpu"] == found["eager"]["places"]["gpu"] == number
    assert 0 < found["hybrid"]["places"]["gpu"] == number - found["hybrid"]["places"]["ram"] < number
    closed, observed = found["graphs"]["launches"]
    assert observed == closed + 1  # one copy of all choices
