from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeflow.core.errors import ConfigError
from moeflow.core.plan import Policy, Workload
from moeflow.planner.costs.cost_model import (
    DEVICE_RESERVE_BYTES,
    DISK_OFFLOAD,
    HOST_COMPUTE,
    TO_DEVICE,
    CostModel,
    IntegerPolicy,
)
from moeflow.planner.costs.hit_curve import HitCurve
from moeflow.planner.costs.model_costs import ModelCosts, expected_distinct
from moeflow.planner.costs.task_costs import OPS, decode_shape, task_cost
from moeflow.planner.hardware.machine_files import load_machine
from tests.planner.examples import HALF, SMALL, machine, routing, small_model
from tests.shapes import MIXTRAL

shares = st.floats(0, 1)
POLICY = Policy(batch_size=8, micro_batch=4, attention_on_device=False, ffn_on_device=True)


def by_hand(host, batch):
    """Return a step of the small model on the round host: bytes at 10 GB/s, 0.1 TFLOP/s, overheads."""
    context = 100 + 21 / 2
    qkv, out, expert = 512 * 64 * 12, 512 * 512, 3 * 512 * 512
    seconds = 1e-4 + batch * 1e-5 + max(2 * 512 * 1000 / 1e10, batch * 2 * 512 * 1000 / 1e11)
    for values in (qkv, out, 512 * 8):
        seconds += 4 * max(2 * values / 1e10, 2 * batch * values / 1e11)
    seconds += 4 * batch * (8 * 512 + 2 * 12 * 64) * 2 / 1e10 + batch * 1000 * 4 / 1e10  # rows, logits
    distinct = 8 * (1 - 0.75**batch)
    seconds += 4 * max(distinct * 2 * expert / 1e10, batch * 2 * 2 * expert / 1e11)
    kv = batch * context * 2 * 2 * 64
    return seconds + 4 * max(2 * kv / 1e10, 4 * 8 * 64 * batch * context / 1e11)


@pytest.mark.parametrize("batch", [1, 7, 100])
def test_a_step_on_a_host_is_the_sum_of_its_stages(batch):
    model = small_model(machine(ram=10**10))
    policy = Policy(batch_size=batch, micro_batch=batch, attention_on_device=False, ffn_on_device=False)
    prediction = model.predict(policy)
    assert prediction.decode_s == pytest.approx(by_hand(model.machine, batch))
    seconds = prediction.prefill_s + 19 * prediction.decode_s
    assert prediction.tokens_per_s == pytest.approx(20 * batch / seconds)
    assert prediction.first_token_s < prediction.prefill_s or batch == 1


def test_what_misses_is_read_from_disk():
    where = machine(ram=10**10)
    disk, ram = where.levels
    ram = dataclasses.replace(ram, processor=dataclasses.replace(ram.processor, stop_s=0.003, load_s=0.0007))
    where = dataclasses.replace(where, levels=(disk, ram))
    model = small_model(where, overlap=0.0, routing=routing(decode=(0.02, 0.08, 0.2, 0.5, 0.9)))
    policy = Policy(batch_size=2, micro_batch=2, attention_on_device=False, ffn_on_device=False, experts_on_disk=0.5)
    busy = model.predict(policy).busy
    distinct = expected_distinct(8, 2, 2)
    loads, stops = 4 * 0.2 * distinct, 4 * (1 - 0.8**distinct)
    assert busy[DISK_OFFLOAD] == pytest.approx(loads * (3 * 512 * 512 * 2 / 5e8 + 0.0007) + stops * 0.003)
    assert model.read_s(policy)[0] == pytest.approx(loads * 3 * 512 * 512 * 2 / 5e8)
    assert model.num_read(policy) == pytest.approx((loads, 4 * expected_distinct(8, 2, 200) * 0.5))
    assert model.predict(policy).decode_s == pytest.approx(busy[DISK_OFFLOAD] + busy[HOST_COMPUTE])
    assert dataclasses.replace(model, overlap=1.0).predict(policy).decode_s == pytest.approx(max(busy.values()))


def test_no_more_is_read_than_is_used():
    learnt = routing(decode=(0.1, 0.2, 0.3, 0.4, 0.5), distinct=0.5)
    model = small_model(machine(ram=10**10), routing=learnt)
    policy = Policy(batch_size=8, micro_batch=8, attention_on_device=False, ffn_on_device=False, experts_on_disk=1.0)
    assert model.num_read(policy)[0] == pytest.approx(4 * 0.5 * expected_distinct(8, 2, 8))


@given(shares, shares, shares)
def test_times_and_bytes_are_linear_in_the_shares(weights, kv, hosted):
    model = small_model(machine(ram=10**10, device=10**10))
    for attends_there in (False, True):
        policy = dataclasses.replace(
            POLICY,
            attention_on_device=attends_there,
            weights_on_device=weights,
            kv_on_device=kv if attends_there else 0.0,
            experts_on_host=0.0 if attends_there else hosted,
        )
        prediction, choice = model.predict(policy), IntegerPolicy.of(policy)
        shares_ = policy.weights_on_device, policy.kv_on_device, policy.experts_on_host, 0.0, 0.0, 0.0
        for resources, busy in (
            (model.decode(choice), prediction.busy),
            (model.prefill(choice), prediction.prefill_busy),
        ):
            for name, seconds in busy.items():
                assert seconds == pytest.approx(max(resources[name].at(*shares_), 0), abs=1e-12)
        for tier, linear in model.memory(choice).items():
            assert prediction.memory[tier] == pytest.approx(linear.at(*shares_), abs=1)


def test_mixtral_streams_all_its_layers_over_the_link_of_a_t4():
    model = CostModel(
        load_machine("paper-s1"), ModelCosts(MIXTRAL, HALF), Workload(prompt_len=77, gen_len=128, max_prompt_len=418)
    )
    layers = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 4096 * 8 + 8 * 3 * 4096 * 14336)
    busy = model.predict(dataclasses.replace(POLICY, batch_size=504, micro_batch=36)).busy
    hidden = 504 * 32 * 4096 * 2
    rate = model.weight_link.bytes_per_s(2 * layers / 32 / 14)
    small = model.machine.link("ram", "device").bytes_per_s(36 * 4096 * 2)
    assert busy[TO_DEVICE] == pytest.approx(2 * layers / rate + hidden / small)


def test_more_devices_share_memory_and_work_but_not_a_common_link():
    model = CostModel(
        load_machine("paper-s7"),
        ModelCosts(MIXTRAL, HALF),
        Workload(prompt_len=77, gen_len=32, max_prompt_len=77),
        num_devices=4,
    )
    one = dataclasses.replace(model, num_devices=1)
    policy = dataclasses.replace(POLICY, weights_on_device=0.3)
    assert model.predict(policy).busy["device"] < one.predict(policy).busy["device"] / 2
    assert model.predict(policy).busy[TO_DEVICE] == pytest.approx(one.predict(policy).busy[TO_DEVICE], rel=0.02)
    grown = model.predict(policy).memory["device"] - DEVICE_RESERVE_BYTES
    assert grown < (one.predict(policy).memory["device"] - DEVICE_RESERVE_BYTES) / 2


percent = st.integers(1, 99).map(lambda number: number / 100)


@given(st.lists(st.tuples(percent, percent), max_size=8), percent, percent)
def test_a_hit_curve_is_convex_below_its_points_and_promises_no_more(points, a, b):
    curve = HitCurve.through(points)
    assert curve.misses(0) == pytest.approx(0)
    assert curve.misses(1) == pytest.approx(1)
    for x, y in points:
        assert curve.misses(x) <= y + 1e-9
    assert curve.misses((a + b) / 2) <= (curve.misses(a) + curve.misses(b)) / 2 + 1e-9


def test_the_tasks_of_a_step_add_up_to_what_the_cost_model_says():
    model = CostModel(
        load_machine("paper-s1"), ModelCosts(MIXTRAL, HALF), Workload(prompt_len=77, gen_len=128, max_prompt_len=418)
    )
    policy = dataclasses.replace(POLICY, batch_size=72, micro_batch=36, weights_on_device=0.1)
    shape = decode_shape(model.costs, 36, model.workload.mean_context, num_pages=2)
    costs = {op: task_cost(op, model.machine, shape, policy) for op in OPS}
    busy, times = model.predict(policy).busy, 2 * 32
    assert busy["host"] == pytest.approx(times * costs["cpu_attention"].seconds)
    head = 2 * model.predict(dataclasses.replace(policy)).busy["device"]
    layers = times * (costs["pre_attention"].seconds + costs["post_attention"].seconds)
    assert layers < busy["device"] < min(layers * 1.05, head)
    moved = times * (costs["load_hidden"].seconds + costs["weights_to_device"].seconds)
    assert busy[TO_DEVICE] == pytest.approx(moved)
    assert busy["link from device"] == pytest.approx(times * costs["offload_qkv"].seconds, rel=0.2)
    assert costs["weights_to_pinned"].num_bytes == pytest.approx(0.9 * model.costs.layers_bytes / 32 / 2)
    assert costs["load_kv"].num_bytes == 36 * model.workload.mean_context * 4096


def test_an_unknown_op_is_refused():
    shape = decode_shape(ModelCosts(SMALL, HALF), 1, 1)
    with pytest.raises(ConfigError, match="known are pre_attention"):
        task_cost("draft", machine(ram=1), shape, POLICY)
    with pytest.raises(ConfigError, match="no level 'device'"):
        task_cost("pre_attention", machine(ram=1), shape, POLICY)
