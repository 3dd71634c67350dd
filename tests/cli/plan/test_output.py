"""What the tables say beside their numbers."""

from __future__ import annotations

import dataclasses

import pytest

from moeflow.cli.plan.output import prediction_table
from moeflow.core.plan import Estimate
from moeflow.planner.plan_maker import make_plan
from moeflow.planner.policy_search import Objective
from tests.planner.examples import machine, small_model


@pytest.mark.slow
def test_a_plan_for_a_machine_that_was_busy_says_so():
    plan = make_plan(small_model(machine(ram=10**9)), Objective(max_sequences=4), model_name="small")
    measured = dataclasses.replace(plan, machine_identity="abc", tokens_per_s=Estimate.within(10.0, 0.2))
    busy = dataclasses.replace(measured, tokens_per_s=Estimate.within(10.0, 1.3))
    notes = {name: " ".join(prediction_table(it).notes) for name, it in (("quiet", measured), ("busy", busy))}
    assert "busy while it was measured" not in notes["quiet"]
    assert "busy while it was measured: its figures lay up to 2.3 times apart" in notes["busy"]
    assert "--recalibrate" in notes["busy"]
    from_sheets = dataclasses.replace(busy, machine_identity="")
    assert "--recalibrate" not in " ".join(prediction_table(from_sheets).notes)
