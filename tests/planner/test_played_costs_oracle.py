"""Each task of a played device by hand: what it moves, what the copies take of a core, what kernels take of all."""

from __future__ import annotations

import dataclasses

import pytest

from moeflow.core.hardware import DEVICE, RAM, Link, LinkRate, Machine, MemoryLevel, Processor
from moeflow.core.plan import Policy
from moeflow.planner.cost_model import ROW_SHARE
from moeflow.planner.model_costs import Formats, ModelCosts
from moeflow.planner.played_costs import (
    ATTENTION_ROWS,
    LINEAR_ROWS,
    ROUTED_BYTES,
    SEQUENCE_S,
    SUM_BYTES,
    TASK_S,
    Part,
    PlayedCosts,
)
from tests.planner.examples import SMALL

# 4 layers of which one is dense, 512 wide, 8 heads of 64 on 2 of K and V, 8 experts of 3 * 512 * 512, two a token.
SHAPE = dataclasses.replace(SMALL, dense_layers=(0,), dense_intermediate_size=100)
COSTS = ModelCosts(SHAPE, Formats(matrices="bfloat16", embeddings="bfloat16", kv="float32", activation_bytes=4))
QKV, OUT, ROUTER, EXPERT, DENSE = 512 * 64 * 12, 512 * 512, 512 * 8, 3 * 512 * 512, 3 * 512 * 100
KV = 2 * 2 * 64 * 4  # of a token in a layer
COPY = 3e9
PART = Part(num_sequences=3, num_tokens=5, num_seen=200, num_read=90, num_copied=96)


def level(name, read, flops):
    processor = Processor(name=name, peak_flops_per_s=(("float32", flops),))
    return MemoryLevel(name=name, capacity_bytes=10**9, read_bytes_per_s=read, processor=processor)


def link(source, target, rate):
    return Link(source=source, target=target, rates=(LinkRate(transfer_bytes=1, bytes_per_s=rate),))


REAL = level(RAM, 1e10, 1e11)
MACHINE = Machine(
    name="played",
    levels=(level(RAM, 1e9, 2e9), level(DEVICE, 5e9, 3e10)),
    links=(link(RAM, DEVICE, 2e8), link(DEVICE, RAM, 7e8)),
    num_devices=1,
)
PLAYED = PlayedCosts(
    COSTS,
    MACHINE,
    REAL,
    COPY,
    Policy(
        batch_size=6,
        micro_batch=3,
        attention_on_device=False,
        ffn_on_device=True,
        weights_on_device=0.25,
        kv_on_device=0.4,
    ),
    num_pages=2,
    num_hosted=2.0,
)
ROWS = 5 * (8 * 512 + 2 * 12 * 64) * 4 / (1e10 * ROW_SHARE)


def linear(values, rows=5):
    return 2 * values, 2 * rows * values


def experts(share):
    return share * 8 * (1 - 0.75**5) * 2 * EXPERT, share * 5 * 2 * 2 * EXPERT


def on(where, num_bytes, num_flops):
    read, flops = {"real": (1e10, 1e11), "host": (1e9, 2e9), "device": (5e9, 3e10)}[where]
    return max(num_bytes / read, num_flops / flops)


ATTENTION = 90 * KV, 200 * 8 * 64 * 4
COMPUTED = {
    "pre_attention": ("device", LINEAR_ROWS * ROWS, [(1, linear(QKV))]),
    "route": ("device", LINEAR_ROWS * ROWS, [(1, linear(OUT)), (1, linear(ROUTER))]),
    # Three layers of four have experts, one is dense: a task stands for the mean.
    "post_attention": (
        "device",
        LINEAR_ROWS * ROWS,
        [(1, linear(OUT)), (0.75, linear(ROUTER)), (0.75, experts(1)), (0.25, linear(DENSE))],
    ),
    "cpu_attention": ("host", ATTENTION_ROWS * ROWS + 3 * SEQUENCE_S, [(1, ATTENTION)]),
    "device_attention": ("device", ATTENTION_ROWS * ROWS + 3 * SEQUENCE_S, [(1, ATTENTION)]),
    "host_experts": ("host", 0.0, [(1, experts(0.25))]),
    "experts": ("device", 0.0, [(1, experts(0.75))]),
}


@pytest.mark.parametrize("op", COMPUTED)
def test_what_is_computed(op):
    where, rows_s, parts = COMPUTED[op]
    cost = PLAYED.of(op, PART)
    assert cost.num_bytes == pytest.approx(sum(share * num_bytes for share, (num_bytes, _) in parts))
    assert cost.num_flops == pytest.approx(sum(share * num_flops for share, (_, num_flops) in parts))
    assert cost.seconds == pytest.approx(sum(share * on(where, *work) for share, work in parts))
    assert cost.kernel_s == pytest.approx(rows_s + sum(share * on("real", *work) for share, work in parts))
    assert cost.core_s == TASK_S


# The streamed weights of a layer: three quarters of all, without the two experts of eight that the host computes.
LAYERS_BYTES = 2 * (4 * (QKV + OUT) + 3 * (ROUTER + 8 * EXPERT) + DENSE)
PAGE = (0.75 * LAYERS_BYTES - 0.25 * 3 * 8 * 2 * EXPERT) / 4 / 2
MOVED = {  # op: link's rate, bytes, how often they are copied
    "offload_qkv": (7e8, 5 * 12 * 64 * 4, 1),
    "load_hidden": (2e8, 5 * 8 * 64 * 4, 1),
    "weights_to_device": (2e8, PAGE, 1),
    "load_kv": (2e8, 0.6 * 96 * KV, 2),
    "offload_routed": (7e8, 5 * (512 * 4 + 2 * ROUTED_BYTES), 1),
    "load_sums": (2e8, 5 * (1 - 0.75**2) * 512 * SUM_BYTES, 1),  # of tokens with an expert on the host
}


@pytest.mark.parametrize("op", MOVED)
def test_what_is_moved(op):
    rate, num_bytes, num_copies = MOVED[op]
    cost = PLAYED.of(op, PART)
    assert (cost.num_bytes, cost.num_flops, cost.kernel_s) == (pytest.approx(num_bytes), 0.0, 0.0)
    assert cost.seconds == pytest.approx(num_bytes / rate)
    assert cost.core_s == pytest.approx(TASK_S + num_copies * num_bytes / COPY)


def test_what_is_pinned_is_only_copied():
    cost = PLAYED.of("weights_to_pinned", PART)
    assert (cost.num_bytes, cost.num_flops, cost.seconds, cost.kernel_s) == (pytest.approx(PAGE), 0.0, 0.0, 0.0)
    assert cost.core_s == pytest.approx(TASK_S + PAGE / COPY)


def test_keys_and_values_that_go_back_are_laid_out_by_a_kernel():
    num_bytes = 0.6 * 5 * 2 * 2 * 64 * 4
    cost = PLAYED.of("store_kv", PART)
    assert (cost.num_bytes, cost.seconds) == (pytest.approx(num_bytes), pytest.approx(num_bytes / 7e8))
    assert cost.core_s == pytest.approx(2 * TASK_S + 3 * num_bytes / COPY)
    assert cost.kernel_s == pytest.approx(ATTENTION_ROWS * ROWS + 3 * SEQUENCE_S)
    resident = dataclasses.replace(PLAYED, policy=dataclasses.replace(PLAYED.policy, kv_on_device=1.0))
    assert resident.of("store_kv", PART).kernel_s == 0.0


def test_no_page_is_less_than_nothing():
    most = dataclasses.replace(PLAYED, policy=dataclasses.replace(PLAYED.policy, weights_on_device=0.9), num_hosted=8.0)
    assert most.of("weights_to_device", PART).num_bytes == 0.0
    dense = ModelCosts(dataclasses.replace(SMALL, num_experts=0, top_k=0), COSTS.formats)
    alone = dataclasses.replace(PLAYED, costs=dense, num_hosted=0.0)
    assert alone.of("weights_to_device", PART).num_bytes == pytest.approx(0.75 * 2 * (QKV + OUT + EXPERT) / 2)


def test_a_part_by_counting():
    sequences = [(3, 5), (1, 16), (2, 0), (4, 17)]
    shown = [start + number + 1 for count, start in sequences for number in range(count)]
    assert Part.of(sequences) == Part(
        num_sequences=4,
        num_tokens=10,
        num_seen=sum(shown),
        num_read=8 + 17 + 2 + 21,
        num_copied=16 + 16 + 0 + 32,
    )
