"""Times and bytes of a device's host, added up by hand: task after task, with every rate, share and size another."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

import pytest

from moeflow.core.hardware import Link, LinkRate, Machine, MemoryLevel, Processor
from moeflow.core.plan import Policy, Workload
from moeflow.planner.costs.cost_model import (
    DEVICE_RESERVE_BYTES,
    CostModel,
    IntegerPolicy,
    LinearCost,
    overlaps,
)
from moeflow.planner.costs.model_costs import Formats, ModelCosts
from moeflow.planner.costs.task_costs import decode_shape, task_cost
from tests.planner.examples import SMALL, machine, routing

# The small model: 4 layers, 512 wide. It has 8 heads of 64 on 2 of K and V, and 8 experts of 3 * 512 * 512, two a
# token.
LAYERS, HIDDEN, EXPERTS = 4, 512, 8
QKV, OUT, ROUTER, EXPERT, HEAD = 512 * 64 * (8 + 2 * 2), 512 * 512, 512 * 8, 3 * 512 * 512, 512 * 1000
OUTSIDE = QKV + OUT + ROUTER
LAYER_BYTES = 2 * (OUTSIDE + EXPERTS * EXPERT)
KV_BYTES = 2 * 2 * 64 * 2  # of a token in a layer
COSTS = ModelCosts(SMALL, Formats(matrices="bfloat16", embeddings="bfloat16", kv="bfloat16", activation_bytes=2))
WORK = Workload(prompt_len=90, gen_len=21, max_prompt_len=120)
CONTEXT = 90 + (1 + 21) / 2  # the mean over the steps: 91 tokens are seen by the first, 111 by the last
BLOCKS = 144  # 141 tokens, in blocks of 16
DEVICE, HOST, LINK, BACK, DISK = "device", "host", "link to device", "link from device", "disk"


def far_machine(num_devices=1, *, is_shared=True):
    def link(source, target, small, large):
        """Half way in the logarithm of the size, a transfer gets half way between the two rates."""
        rates = (LinkRate(transfer_bytes=2**10, bytes_per_s=small), LinkRate(transfer_bytes=2**30, bytes_per_s=large))
        return Link(source=source, target=target, rates=rates, is_shared=is_shared)

    cpu = Processor(name="cpu", peak_flops_per_s=(("bfloat16", 3e10),), default_efficiency=0.8, launch_s=2e-6)
    gpu = Processor(name="gpu", peak_flops_per_s=(("bfloat16", 7e12),), default_efficiency=0.5, launch_s=5e-6)
    return Machine(
        name="far",
        levels=(
            MemoryLevel(name="disk", capacity_bytes=10**12, read_bytes_per_s=5e8),
            MemoryLevel(name="ram", capacity_bytes=10**11, read_bytes_per_s=1.1e10, processor=cpu),
            MemoryLevel(name="pinned", capacity_bytes=10**10, read_bytes_per_s=1.1e10),
            MemoryLevel(name="device", capacity_bytes=10**10, read_bytes_per_s=1.3e11, processor=gpu),
        ),
        links=(
            link("disk", "ram", 1e8, 6e8),
            link("ram", "pinned", 9e9, 8e9),
            link("pinned", "device", 2e9, 4e9),
            link("ram", "device", 1e9, 3e9),
            link("device", "ram", 1.5e9, 2.5e9),
        ),
        num_devices=num_devices,
    )


def rate(where, source, target, transfer_bytes):
    """Bytes a second of a transfer, by the line between the two sizes that are known."""
    small, large = (each.bytes_per_s for each in where.link(source, target).rates)
    share = min(max((math.log2(transfer_bytes) - 10) / 20, 0), 1)
    return small + (large - small) * share


def on_device(num_bytes, num_flops, devices=1):
    return max(num_bytes / 1.3e11, num_flops / 7e12) / devices / 0.5 + 5e-6


def on_host(num_bytes, num_flops):
    return max(num_bytes / 1.1e10, num_flops / 3e10) / 0.8 + 2e-6


def linear(values, rows):
    return 2 * values, 2 * rows * values


def experts(tokens):
    used = EXPERTS * (1 - (1 - 2 / 8) ** tokens)
    return 2 * used * EXPERT, 2 * 2 * tokens * EXPERT


def policy(batch, micro_batch, **others):
    fields = {"attention_on_device": False, "ffn_on_device": True, "weights_on_device": 0.25}
    return Policy(batch_size=batch, micro_batch=micro_batch, **fields | others)


def step_by_hand(where, plan, devices=1):
    """Each task of a decoding step, on its resource."""
    busy: Counter[str] = Counter({DEVICE: 0.0, HOST: 0.0, LINK: 0.0, BACK: 0.0})
    width = 1 if where.link("ram", "device").is_shared else devices
    mu, count = plan.micro_batch, plan.num_micro_batches
    hosted = plan.experts_on_host
    page = (0.75 * LAYER_BYTES - hosted * EXPERTS * EXPERT * 2) / count
    for _layer in range(LAYERS):
        for _micro_batch in range(count):
            busy[DEVICE] += on_device(*linear(QKV, mu), devices) + on_device(*linear(OUT, mu), devices)
            busy[DEVICE] += on_device(*linear(ROUTER, mu), devices) + (1 - hosted) * on_device(*experts(mu), devices)
            busy[HOST] += hosted * on_host(*experts(mu))
            if hosted:
                sums, routed = mu * (512 * 4 + 8), mu * (512 * 2 + 2 * (8 + 4))
                busy[LINK] += sums / width / rate(where, "ram", "device", mu * 512 * 2 / width)
                busy[BACK] += routed / width / rate(where, "device", "ram", mu * 512 * 2 / width)
            attention = mu * CONTEXT * KV_BYTES, mu * CONTEXT * 8 * 64 * 4
            full_page = LAYER_BYTES / count / width
            busy[LINK] += page / width / rate(where, "pinned", "device", full_page)
            if plan.attention_on_device:
                busy[DEVICE] += on_device(*attention, devices)
                moved = (1 - plan.kv_on_device) * mu * CONTEXT * KV_BYTES
                new = (1 - plan.kv_on_device) * mu * KV_BYTES
                busy[LINK] += moved / width / rate(where, "ram", "device", mu * CONTEXT * KV_BYTES / width)
                busy[BACK] += new / width / rate(where, "device", "ram", mu * KV_BYTES / width)
            else:
                busy[HOST] += on_host(*attention)
                busy[LINK] += mu * 512 * 2 / width / rate(where, "ram", "device", mu * 512 * 2 / width)
                # The rate is that of hidden states, though queries, keys and values are half as many again.
                busy[BACK] += mu * 64 * 12 * 2 / width / rate(where, "device", "ram", mu * 512 * 2 / width)
            summed = 2 * mu * 512 * 2 * (1 - 1 / devices)  # after attention and after experts
            busy[LINK] += summed / width / rate(where, "ram", "device", mu * 512 * 2 / width)
            busy[BACK] += summed / width / rate(where, "device", "ram", mu * 512 * 2 / width)
    busy[DEVICE] += count * on_device(*linear(HEAD, mu), devices)
    return dict(busy)


POLICIES = [
    policy(6, 6),
    policy(21, 7),
    policy(400, 100),
    policy(6, 3, attention_on_device=True, kv_on_device=0.4),
    policy(64, 16, attention_on_device=True, kv_on_device=0.4),
    policy(6, 3, attention_on_device=True, kv_on_device=1.0),
    policy(60, 20, experts_on_host=0.375),
    policy(60, 6, chunk_tokens=1000, prompts=3),
]


@pytest.mark.parametrize("plan", POLICIES)
@pytest.mark.parametrize(("devices", "is_shared"), [(1, True), (2, True), (3, False)])
def test_a_step_is_the_sum_of_its_tasks(plan, devices, is_shared):
    where = far_machine(devices, is_shared=is_shared)
    model = CostModel(where, COSTS, WORK, num_devices=devices)
    assert model.predict(plan).busy == pytest.approx(step_by_hand(where, plan, devices))


def prefill_by_hand(where, plan, passes):
    """So many passes over all prompts of 90 tokens."""
    tokens, kept = min(plan.prompts, plan.batch_size) * 90, plan.kv_on_device
    count = math.ceil(plan.batch_size * 90 / passes / tokens)
    one = on_device(*linear(QKV, tokens)) + on_device(*linear(OUT, tokens)) + on_device(*linear(ROUTER, tokens))
    pairs = tokens * 91 / 2  # of a query and a position that it sees
    one += on_device(*experts(tokens)) + on_device(tokens * KV_BYTES, pairs * 8 * 64 * 4)
    streamed = 0.75 * LAYER_BYTES - plan.experts_on_host * EXPERTS * EXPERT * 2
    expected = {
        DEVICE: passes * count * (LAYERS * one + on_device(*linear(HEAD, plan.prompts))),
        LINK: passes * LAYERS * streamed / rate(where, "pinned", "device", LAYER_BYTES),
        BACK: (1 - kept) * LAYERS * plan.batch_size * 90 * KV_BYTES / rate(where, "device", "ram", tokens * KV_BYTES),
    }
    if plan.experts_on_host:
        expected[HOST] = passes * count * LAYERS * plan.experts_on_host * on_host(*experts(tokens))
    return expected


@pytest.mark.parametrize("plan", POLICIES)
def test_a_prefill_is_the_sum_of_its_passes(plan):
    where = far_machine()
    model = CostModel(where, COSTS, WORK)
    expected = prefill_by_hand(where, plan, model.num_prompt_passes(IntegerPolicy.of(plan)))
    prediction = model.predict(plan)
    assert prediction.prefill_busy == pytest.approx(expected)
    in_turn = max(expected[DEVICE], expected[LINK]) + expected.get(HOST, 0.0)
    assert prediction.prefill_s == pytest.approx(max(*expected.values(), in_turn))
    seconds = prediction.prefill_s + 20 * prediction.decode_s
    assert prediction.tokens_per_s == pytest.approx(plan.batch_size * 21 / seconds)


@pytest.mark.parametrize(("batch", "most"), [(6, 512), (64, 512), (300, 400), (1000, 1000), (5000, 5000), (900, 30000)])
@pytest.mark.parametrize("gen_len", [2, 21, 400])
def test_prompts_take_as_many_passes_as_a_scheduler_makes(batch, most, gen_len):
    model = CostModel(far_machine(), COSTS, dataclasses.replace(WORK, gen_len=gen_len))
    plan = policy(batch, batch, chunk_tokens=most)
    left, decoding, number = batch * 90, 0, 0
    ends: Counter[int] = Counter()  # answers that are complete before a pass
    while left > 0:
        decoding -= ends[number]
        before = math.ceil(left / 90)
        left = max(left - (most - decoding), 0)
        begun = before - math.ceil(left / 90)
        decoding += begun
        number += 1
        ends[number + gen_len - 1] += begun
    assert model.num_prompt_passes(IntegerPolicy.of(plan)) == pytest.approx(number, rel=0.03, abs=1)


def test_the_first_token_of_a_request_that_finds_nobody_comes_after_its_own_prompt():
    model = CostModel(far_machine(), COSTS, WORK)
    alone = model.predict(dataclasses.replace(POLICIES[1], batch_size=1, micro_batch=1))
    assert model.predict(POLICIES[1]).first_token_s == alone.prefill_s == alone.first_token_s


@pytest.mark.parametrize("plan", POLICIES)
@pytest.mark.parametrize("devices", [1, 2])
def test_memory_is_the_sum_of_what_lies_there(plan, devices):
    kept, num_tokens = plan.kv_on_device, max(plan.chunk_tokens, plan.batch_size)
    all_kv = plan.batch_size * BLOCKS * LAYERS * KV_BYTES
    resident, streamed = 0.25 * LAYERS * LAYER_BYTES, 0.75 * LAYER_BYTES
    at_once = plan.micro_batch if plan.attention_on_device else plan.prompts
    windows = 0 if kept == 1 else 2 * at_once * BLOCKS * KV_BYTES
    norms = (2 * LAYERS + 1) * 512 * 4
    shared = 2 * HEAD * 2 + norms + resident + 2 * streamed + kept * all_kv + windows  # two tables, not tied
    widest = (2 * 512 + 2 * (3 * 512 + 512)) * 2
    largest = min(max(plan.prompts * 141, plan.micro_batch), num_tokens)
    model = CostModel(far_machine(devices), COSTS, WORK, num_devices=devices, process_bytes=12345)
    assert model.predict(plan).memory == pytest.approx(
        {
            "device": shared / devices + DEVICE_RESERVE_BYTES + largest * widest + num_tokens * 2 * 512 * 2,
            "ram": 12345 + LAYERS * EXPERTS * EXPERT * 2 + 2 * streamed + (1 - kept) * all_kv + windows,
        }
    )


@pytest.mark.parametrize(("batch", "chunk"), [(1, 90), (1, 512), (5, 30), (7, 100)])
def test_a_host_computes_prompts_in_equal_passes(batch, chunk):
    """By hand for the round machine: 10 GB/s, 0.1 TFLOP/s, 100 us a pass and 10 us a sampled token."""
    model = CostModel(machine(ram=10**10), COSTS, WORK, process_bytes=77, chunk_tokens=chunk)
    passes = math.ceil(batch * 90 / chunk)
    tokens = batch * 90 / passes
    seconds = passes * 1e-4 + batch * 1e-5
    seconds += passes * max(2 * HEAD / 1e10, batch / passes * 2 * HEAD / 1e11)
    for values in (QKV, OUT, ROUTER):
        seconds += passes * LAYERS * max(2 * values / 1e10, 2 * tokens * values / 1e11)
    num_bytes, num_flops = experts(tokens)
    seconds += passes * LAYERS * max(num_bytes / 1e10, num_flops / 1e11)
    seconds += LAYERS * batch * 90 * (8 * 512 + 2 * 12 * 64) * 2 / 1e10
    seconds += batch * 1000 * 4 / 1e10  # logits
    in_prompt = min(chunk, 90)
    read = batch * (90 / in_prompt + 1) / 2 * 90 * KV_BYTES
    seconds += LAYERS * max(read / 1e10, batch * 90 * 91 / 2 * 8 * 64 * 4 / 1e11)
    plan = Policy(batch_size=batch, micro_batch=batch, attention_on_device=False, ffn_on_device=False)
    prediction = model.predict(plan)
    assert prediction.prefill_busy == pytest.approx({HOST: seconds, DISK: 0.0})
    assert prediction.prefill_s == pytest.approx(seconds)
    weights = LAYERS * LAYER_BYTES + 2 * 2 * HEAD + (2 * LAYERS + 1) * 512 * 4
    assert prediction.memory == pytest.approx({"ram": 77 + weights + batch * BLOCKS * LAYERS * KV_BYTES, "disk": 0})


def test_experts_on_disk_leave_a_hosts_memory_and_are_read_by_prompts():
    learnt = routing(decode=(0.02, 0.08, 0.2, 0.5, 0.9), prefill=(0.1, 0.2, 0.4, 0.6, 0.8), distinct=0.9)
    model = CostModel(machine(ram=10**10), COSTS, WORK, process_bytes=0, routing=learnt, chunk_tokens=60)
    plan = Policy(batch_size=2, micro_batch=2, attention_on_device=False, ffn_on_device=False, experts_on_disk=0.5)
    prediction, resident = model.predict(plan), model.predict(dataclasses.replace(plan, experts_on_disk=0.0))
    assert resident.memory["ram"] - prediction.memory["ram"] == 0.5 * LAYERS * EXPERTS * EXPERT * 2
    assert prediction.memory["disk"] == 0.5 * LAYERS * EXPERTS * EXPERT * 2
    used = EXPERTS * (1 - 0.75**60)  # by each of three passes of 60 tokens
    step, prompts = model.num_read(plan)
    assert prompts == pytest.approx(3 * LAYERS * used * 0.4)
    assert step == pytest.approx(LAYERS * EXPERTS * (1 - 0.75**2) * 0.2)
    read_s = 2 * EXPERT / 5e8 + 1e-4  # reading streams, and nothing stops
    assert prediction.prefill_busy[DISK] == pytest.approx(prompts * read_s)


def test_what_overlaps_where_the_engine_runs():
    where = machine(ram=10**9)
    ram = where.level("ram")
    slow = dataclasses.replace(ram, processor=dataclasses.replace(ram.processor, read_overlap=0.25))
    assert overlaps(dataclasses.replace(where, levels=(where.level("disk"), slow))) == (0.0, 0.25)
    assert overlaps(machine(ram=10**9, device=10**9)) == (1.0, 1.0)


def test_resources_that_overlap_in_part():
    assert CostModel.combine({"a": 3.0, "b": 1.0, "c": 2.0}, 1.0) == 3.0
    assert CostModel.combine({"a": 3.0, "b": 1.0, "c": 2.0}, 0.0) == 6.0
    assert CostModel.combine({"a": 3.0, "b": 1.0, "c": 2.0}, 0.75) == 3.75
    assert CostModel.combine({"a": 3.0, "b": 1.0, "waits: b": 5.0}, 1.0) == 5.0
    assert CostModel.combine({"a": 3.0, "b": 1.0, "waits: b": 2.0}, 0.0) == 4.0


def test_linear_terms():
    one, other = LinearCost(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0), LinearCost(10.0, kv=20.0, streamed=30.0)
    assert (one + other).terms == (11.0, 2.0, 23.0, 4.0, 5.0, 6.0, 37.0)
    assert (one * 3).terms == (3.0, 6.0, 9.0, 12.0, 15.0, 18.0, 21.0)
    assert one.at(10.0, 100.0, 1e3, 1e4, 1e5, 1e6) == 1 + 20 + 300 + 4000 + 5e4 + 6e5 + 7e6
    assert IntegerPolicy(3, 5, True).batch_size == 15
    assert IntegerPolicy.of(policy(9, 4)) == IntegerPolicy(4, 3, False)


@pytest.mark.parametrize("devices", [1, 3])
def test_each_task_by_hand(devices):
    """Seven sequences that see 50 tokens, a quarter of the weights and two fifths of K and V on the device."""
    where, plan = far_machine(devices, is_shared=False), policy(7, 7, kv_on_device=0.4, num_devices=devices)

    def cost(op, of=where, under=plan):
        return task_cost(op, of, decode_shape(COSTS, 7, 50.0, num_pages=3), under)

    pre, out = linear(QKV, 7), linear(OUT, 7)
    attention = 7 * 50 * KV_BYTES, 7 * 50 * 8 * 64 * 4
    after = [out, linear(ROUTER, 7), experts(7)]
    assert dataclasses.astuple(cost("pre_attention")) == pytest.approx((*pre, on_device(*pre, devices)))
    assert dataclasses.astuple(cost("device_attention")) == pytest.approx((*attention, on_device(*attention, devices)))
    assert dataclasses.astuple(cost("cpu_attention")) == pytest.approx((*attention, on_host(*attention)))
    summed = tuple(sum(column) for column in zip(*after, strict=True))
    expected = (*summed, sum(on_device(*each, devices) for each in after))
    assert dataclasses.astuple(cost("post_attention")) == pytest.approx(expected)

    page = 0.75 * LAYER_BYTES / 3
    moves = {
        "offload_qkv": ("device", "ram", 7 * 12 * 64 * 2),
        "load_hidden": ("ram", "device", 7 * 8 * 64 * 2),
        "weights_to_device": ("pinned", "device", page),
        "load_kv": ("ram", "device", 0.6 * 7 * 50 * KV_BYTES),
        "store_kv": ("device", "ram", 0.6 * 7 * KV_BYTES),
    }
    for op, (source, target, num_bytes) in moves.items():
        each = num_bytes / devices
        expected = (num_bytes, 0.0, each / rate(where, source, target, each))
        assert dataclasses.astuple(cost(op)) == pytest.approx(expected), op
    pinned = (page, 0.0, page / rate(where, "ram", "pinned", page))
    assert dataclasses.astuple(cost("weights_to_pinned")) == pytest.approx(pinned)
    cached = 0.6 * 7 * 50 * KV_BYTES
    gathered = (cached, 0.0, cached / rate(where, "ram", "pinned", cached))
    assert dataclasses.astuple(cost("kv_to_pinned")) == pytest.approx(gathered)
    assert dataclasses.astuple(cost("save_kv")) == (0.0, 0.0, 0.0)

    shared = far_machine(devices)
    assert cost("load_hidden", of=shared).seconds == pytest.approx(
        7 * 8 * 64 * 2 / rate(shared, "ram", "device", 7 * 8 * 64 * 2)
    )
    unpinned = dataclasses.replace(where, levels=tuple(level for level in where.levels if level.name != "pinned"))
    assert dataclasses.astuple(cost("weights_to_pinned", of=unpinned)) == (0.0, 0.0, 0.0)
    each = page / devices
    assert cost("weights_to_device", of=unpinned).seconds == pytest.approx(each / rate(where, "ram", "device", each))


def test_what_follows_attention_in_a_dense_model():
    dense = ModelCosts(SMALL.with_fields(num_experts=0, top_k=0), COSTS.formats)
    cost = task_cost("post_attention", far_machine(), decode_shape(dense, 7, 1.0), policy(7, 7))
    assert cost.seconds == pytest.approx(on_device(*linear(OUT, 7)) + on_device(*linear(EXPERT, 7)))


def test_a_layer_without_experts_costs_what_it_computes():
    mixed = SMALL.with_fields(dense_layers=(1,), dense_intermediate_size=512)
    of_layers = [
        task_cost(
            "post_attention",
            far_machine(),
            decode_shape(ModelCosts(mixed, COSTS.formats), 7, 1.0, layer=layer),
            policy(7, 7),
        )
        for layer in (0, 1)
    ]
    routed = on_device(*linear(ROUTER, 7)) + on_device(*experts(7))
    expected = [on_device(*linear(OUT, 7)) + rest for rest in (routed, on_device(*linear(EXPERT, 7)))]
    assert [cost.seconds for cost in of_layers] == pytest.approx(expected)
