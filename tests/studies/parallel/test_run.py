"""Refusals before any measurement, and invalid results."""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np
import pytest

from moeflow.core.errors import CapacityError, ConfigError, EngineError
from moeflow.planner.hardware.host import host_resources
from studies.parallel.prediction import kernel_shapes, predict
from studies.parallel.rank_rates import ROWS, Measured
from studies.parallel.run import MAX_ERROR, check, check_result, needed_bytes
from tests.planner.examples import machine
from tests.studies.parallel.cases import case, shape


@pytest.mark.parametrize(
    ("layout", "is_equal", "error"),
    [("expert", False, 1e-7), ("capacity", False, 0.5), ("sliced", False, 2 * MAX_ERROR), ("sliced", False, np.nan)],
)
def test_a_wrong_result_is_an_error(layout, is_equal, error):
    with pytest.raises(EngineError, match=f"layout {layout} computes something else"):
        check_result(layout, is_equal=is_equal, error=error)


def test_slices_may_differ_in_the_last_bits():
    check_result("sliced", is_equal=False, error=1e-6)
    check_result("expert", is_equal=True, error=0.0)


def test_more_ranks_than_units_are_refused():
    with pytest.raises(ConfigError, match="21 ranks cannot each have a slice of 20 units"):
        check(case(shape(num_ranks=21)), ["sliced"])


def test_what_does_not_fit_is_refused(monkeypatch):
    of = case(num_tokens=(100,) * 3, router_skew=1.0)
    padding = needed_bytes(of, ["capacity-dropless"]) - needed_bytes(of, ["sliced"])
    assert padding == 4 * 3 * 5 * 100 * 4 * 24  # four times, of three ranks, five experts and all 100 tokens
    resources = dataclasses.replace(host_resources(), available_bytes=needed_bytes(of, ["sliced"]))
    monkeypatch.setattr("studies.parallel.run.host_resources", lambda: resources)
    check(of, ["sliced"])
    with pytest.raises(CapacityError, match="5 experts, skew 1, 100 tokens a rank: needs"):
        check(of, ["sliced", "capacity-dropless"])


MEASURED = Measured(
    choose_s=(0.0, 0.0),
    copy_s=1e-3,
    exchange_s=(1e-5, 1e-3),
    whole_s=[(rows, 1e-4 * rows) for rows in ROWS],
    slice_s=[(rows, 5e-5 * rows) for rows in ROWS],
)


def test_a_rank_has_its_share_of_a_machine_that_others_use_at_the_same_time(monkeypatch):
    of = case(shape(num_ranks=2))
    predicted = []
    for num_cores in (1, 2):
        resources = dataclasses.replace(host_resources(), num_cores=num_cores)
        monkeypatch.setattr("studies.parallel.prediction.host_resources", lambda found=resources: found)
        predicted.append(predict(of, machine(ram=10**10), ["sliced"], MEASURED)["sliced"].sections)
    assert predicted[1]["route"] == pytest.approx(2 * predicted[0]["route"])
    for section in ("dispatch", "experts", "combine"):  # which are measured while all ranks are at work
        assert predicted[1][section] == pytest.approx(predicted[0][section])


def test_predictions_start_from_what_ranks_measure_by_themselves():
    """Twice the time of a constant is twice the section that consists of it."""

    def sections(layout: str = "sliced", **slower: object) -> dict[str, float]:
        measured = msgspec.structs.replace(MEASURED, **slower)
        cost = predict(case(shape(num_ranks=2)), machine(ram=10**10), [layout], measured)[layout]
        return {name: float(seconds.max()) for name, seconds in cost.sections.items()}

    slices, whole = ([(rows, 2 * seconds) for rows, seconds in it] for it in (MEASURED.slice_s, MEASURED.whole_s))
    assert sections(slice_s=slices)["experts"] == pytest.approx(2 * sections()["experts"])
    assert sections(whole_s=whole)["experts"] == sections()["experts"]
    assert sections("expert", whole_s=whole)["experts"] == pytest.approx(2 * sections("expert")["experts"])
    assert sections(choose_s=(0.002, 0.001))["route"] > sections()["route"]
    small_s, large_s = MEASURED.exchange_s
    more_s = sections(exchange_s=(small_s + 1, large_s + 1))["dispatch"] - sections()["dispatch"]
    assert more_s == pytest.approx(2)  # choices and rows: an exchange each
    assert sections(copy_s=1.0)["combine"] > sections()["combine"]


def test_a_machine_is_measured_with_as_many_weights_as_an_expert_has():
    linear, *experts = kernel_shapes(shape(num_ranks=2, is_gated=False, hidden=8, width=24, top_k=1))
    assert linear.values == 5 * 8
    assert [it.values for it in experts] == [2 * 8 * 24, 2 * 8 * 12]
    gated = kernel_shapes(shape(num_ranks=2, hidden=8, width=24))
    assert [it.values for it in gated[1:]] == [3 * 8 * 24, 3 * 8 * 12]
