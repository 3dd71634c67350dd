"""Batches in flight: times computed manually for a machine that only computes, and bounds for any machine."""

from __future__ import annotations

import numpy as np
import pytest

from moeflow.core.hardware import Link, LinkRate
from moeflow.parallel.placement.placement import ExpertPlacement
from moeflow.planner.costs.model_costs import Formats, ModelCosts
from moeflow.planner.costs.roofline import work_seconds
from studies.asynchronous.expert_parallel import ATTEND, COMBINE, DISPATCH, EXPERTS
from studies.asynchronous.inflight_run import SCHEDULES, InFlight, InFlightRun
from studies.asynchronous.mapper import LayerMapper, RoundRobinMapper
from tests.planner.examples import SMALL as SHAPE
from tests.planner.examples import machine

LINK = Link(source="rank", target="rank", rates=(LinkRate(transfer_bytes=1, bytes_per_s=1e9),))
COSTS = ModelCosts(SHAPE, Formats(matrices="bfloat16", embeddings="bfloat16", kv="bfloat16"))
SIZE, CONTEXT = 6, 10


def run(schedule, num_devices=2, num_batches=4, choose=None, num_layers=2, link=LINK, mapper=None):
    at = InFlight(
        level=machine(ram=2**40).compute_level,
        link=link,
        costs=COSTS,
        num_layers=num_layers,
        num_devices=num_devices,
        num_batches=num_batches,
        batch_size=SIZE,
        context=CONTEXT,
    )
    placement = ExpertPlacement.by_index(num_layers, SHAPE.routing.num_experts, num_devices)
    return at, InFlightRun(at, choose or chosen, mapper or RoundRobinMapper(placement), schedule)


def chosen(layer, batch):
    rng = np.random.default_rng(layer * 100 + batch)
    return np.array([rng.permutation(SHAPE.routing.num_experts)[: SHAPE.routing.top_k] for _ in range(SIZE)])


def seconds(at, *works):
    return sum(work_seconds(at.level, work) for work in works)


def attention_s(at):
    stages = COSTS.pre_attention(SIZE), COSTS.decode_attention(SIZE, CONTEXT)
    return seconds(at, *stages, COSTS.output_projection(SIZE), COSTS.router(SIZE))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_device_does_one_thing_after_another(schedule):
    at, found = run(schedule, num_devices=1, num_batches=1)
    layers = [np.unique(chosen(layer, 0)).size for layer in range(2)]
    want = sum(attention_s(at) + seconds(at, COSTS.experts(SIZE, distinct)) for distinct in layers)
    assert found.seconds == pytest.approx(want)
    assert found.idle_shares == pytest.approx(np.zeros(1))


def test_barriers_make_the_slowest_of_each_section_decide():
    at, found = run("synchronous")
    row_s = SHAPE.hidden_size * COSTS.formats.activation_bytes / 1e9
    want = 0.0
    for layer in range(2):
        for batches in ((0, 1), (2, 3)):
            owners = {batch: chosen(layer, batch) >= SHAPE.routing.num_experts // 2 for batch in batches}
            pairs = {d: np.concatenate([chosen(layer, b)[owners[b] == d] for b in batches]) for d in range(2)}
            experts = [
                seconds(at, COSTS.experts(len(ids) / SHAPE.routing.top_k, np.unique(ids).size))
                for ids in pairs.values()
            ]
            rows = [int((owners[batch] == 1 - home).any(axis=1).sum()) for home, batch in enumerate(batches)]
            want += attention_s(at) + max(experts) + 2 * max(rows) * row_s  # what goes comes back
    assert found.seconds == pytest.approx(want)


def test_without_barriers_devices_idle_less_where_each_batch_is_uneven_by_turns():
    def by_turns(layer, batch):
        half = SHAPE.routing.num_experts // 2
        return np.tile(np.arange(SHAPE.routing.top_k) + half * ((layer + batch // 2) % 2), (SIZE, 1))

    _, waiting = run("synchronous", num_batches=8, choose=by_turns)
    _, free = run("asynchronous", num_batches=8, choose=by_turns)
    assert free.seconds < waiting.seconds
    assert free.idle_shares.mean() < waiting.idle_shares.mean() / 2


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_all_pairs_are_computed_and_all_rows_come_back(schedule):
    at, found = run(schedule, num_devices=3, num_batches=5)
    done = [one for ones in found.line.lanes.values() for one in ones]
    by_op = {op: [one.cost for one in done if one.task.op == op] for op in (ATTEND, DISPATCH, EXPERTS, COMBINE)}
    flops = 2 * 5 * SIZE * SHAPE.routing.top_k * 2 * COSTS.expert_values
    assert sum(cost.num_flops for cost in by_op[EXPERTS]) == pytest.approx(flops)
    assert sum(cost.num_bytes for cost in by_op[DISPATCH]) == sum(cost.num_bytes for cost in by_op[COMBINE]) > 0
    assert len(by_op[ATTEND]) == 2 * 5
    assert at.num_devices == len(found.idle_shares)


def test_without_a_link_rows_are_copied_in_the_hosts_memory():
    at, found = run("synchronous", link=None)
    sent = [one for ones in found.line.lanes.values() for one in ones if one.task.op == DISPATCH]
    assert all(one.cost.seconds == 2 * one.cost.num_bytes / at.level.read_bytes_per_s for one in sent)
    assert any(one.cost.num_bytes for one in sent)


def most_layers_at_once(found):
    """Return how many layers' experts were computed at the same time at most."""
    done = [one for ones in found.line.lanes.values() for one in ones if one.task.op == EXPERTS]
    return max(len({it.task.layer for it in done if it.start_s <= one.start_s < it.end_s}) for one in done)


def test_stages_arise_where_layers_are_mapped_to_devices_and_more_batches_are_in_flight():
    """P > D: no pipeline was scheduled, but devices compute different layers at the same time."""

    def in_flight(num_batches, schedule="asynchronous"):
        return run(schedule, num_devices=3, num_batches=num_batches, num_layers=6, mapper=LayerMapper(3))[1]

    alone, many, waiting = in_flight(1), in_flight(9), in_flight(9, "synchronous")
    for lane, ones in many.line.lanes.items():
        assert all(lane == f"device {one.task.layer % 3}" for one in ones if one.task.op == EXPERTS)
    assert [most_layers_at_once(found) for found in (alone, waiting, many)] == [1, 1, 3]
    assert many.seconds < waiting.seconds < 9 * alone.seconds
    assert many.idle_shares.mean() < waiting.idle_shares.mean() / 1.5
