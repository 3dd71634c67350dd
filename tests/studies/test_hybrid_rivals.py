"""Forecasts of shared experts lie near what other programs publish, on machines described by data sheets."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from moeflow.core.hardware import RAM
from studies import hybrid_rivals


@pytest.mark.parametrize("rival", hybrid_rivals.rivals(), ids=lambda it: it.name)
def test_a_forecast_is_within_a_factor_of_two(rival):
    assert 0.5 < rival.ratio < 2
    if rival.workload.gen_len > 1:  # no faster than memory is read
        chosen = rival.costs.num_moe_layers * rival.costs.shape.routing.top_k * rival.costs.expert_bytes
        level = rival.machine.level(RAM)
        assert rival.forecast < level.read_bytes_per_s / ((1 - rival.share) * chosen)


def test_the_table_has_all_of_them():
    done = CliRunner().invoke(hybrid_rivals.main)
    assert done.exit_code == 0
    assert all(it.machine.name in done.output for it in hybrid_rivals.rivals())
