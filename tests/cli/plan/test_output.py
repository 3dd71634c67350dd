"""What the tables say beside their numbers."""

from __future__ import annotations

import dataclasses

import pytest

from moeflow.cli.plan.output import plan_tables, prediction_table
from moeflow.core.parallel_config import ParallelConfig
from moeflow.core.plan import Estimate
from tests.planner.example_plans import FORECAST, PLAN


def test_a_plan_for_a_machine_that_was_busy_shows_it():
    quiet = dataclasses.replace(FORECAST, tokens_per_s=Estimate.within(10.0, 0.2))
    busy = dataclasses.replace(FORECAST, tokens_per_s=Estimate.within(10.0, 1.3))
    here = dataclasses.replace(PLAN, machine_identity="abc")
    notes = {name: " ".join(prediction_table(here, it).notes) for name, it in (("quiet", quiet), ("busy", busy))}
    assert "busy while it was measured" not in notes["quiet"]
    assert "busy while it was measured: its figures lay up to 2.3 times apart" in notes["busy"]
    assert "--recalibrate" in notes["busy"]
    assert "--recalibrate" not in " ".join(prediction_table(PLAN, busy).notes)  # from data sheets


def test_a_plan_of_which_nothing_is_expected_shows_what_was_chosen():
    (table,) = plan_tables(dataclasses.replace(PLAN, forecast=None, reasons=(("max_num_seqs", "6: so it is"),)))
    rows = {name: (value, why) for name, value, why in table.rows}
    assert rows["sequences at once (N)"] == ("6", "so it is (--max-num-seqs)")
    assert rows["KV cache"] == ("bfloat16", "1.0 MiB in memory")


@pytest.mark.parametrize(("device", "where"), [("cpu", "1.0 MiB in memory"), ("cuda:0", "1.0 MiB in device memory")])
def test_the_device_and_its_reason_come_first(device, where):
    config = dataclasses.replace(PLAN.config, device=device)
    (table,) = plan_tables(
        dataclasses.replace(PLAN, config=config, forecast=None, reasons=(("device", f"{device}: as it is: so"),))
    )
    assert table.rows[0] == ("device", device, "as it is: so")
    assert ("KV cache", "bfloat16", where) in table.rows


def test_a_plan_for_several_processes_shows_what_they_share_and_hold():
    config = dataclasses.replace(PLAN.config, parallel=ParallelConfig(num_ranks=2))
    reasons = (("ranks", "2: each has half"), ("memory of ranks", "5 GiB and 1 GiB, 6 GiB and 1 GiB"))
    (table,) = plan_tables(dataclasses.replace(PLAN, config=config, forecast=None, reasons=reasons))
    rows = {name: (value, why) for name, value, why in table.rows}
    assert rows["ranks"] == ("2", "each has half")
    assert rows["weights and KV cache"] == ("by rank", "5 GiB and 1 GiB, 6 GiB and 1 GiB")
