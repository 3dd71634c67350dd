"""Tasks on a processor that plays the device, against what is moved and computed."""

from __future__ import annotations

import dataclasses

import pytest

from moeflow.core.hardware import RAM
from moeflow.core.offload_config import EmulatedDeviceConfig, EmulatedSpeeds, t4_like
from moeflow.core.plan import Policy
from moeflow.pipeline.catalog import PIPELINES
from moeflow.planner.emulated_machine import with_emulated_device
from moeflow.planner.model_costs import Formats, ModelCosts
from moeflow.planner.played_costs import TASK_S, Part, PlayedCosts
from moeflow.planner.roofline import work_seconds
from tests.planner.examples import SMALL, machine

COSTS = ModelCosts(SMALL, Formats(matrices="bfloat16", embeddings="bfloat16", kv="float32"))
POLICY = Policy(
    batch_size=8, micro_batch=4, attention_on_device=False, ffn_on_device=True, weights_on_device=0.25, kv_on_device=0.0
)
LINK = 1e8


LINK_ALONE = EmulatedSpeeds(link=LINK)


def costs(speeds=LINK_ALONE, **changes):
    host = machine(ram=10**9)
    played = with_emulated_device(host, EmulatedDeviceConfig(capacity_bytes=10**9, speeds=speeds))
    policy = dataclasses.replace(POLICY, **changes)
    return PlayedCosts(COSTS, played, host.level(RAM), 1e10, policy, num_pages=2), host.level(RAM)


def test_a_part_counts_what_attention_sees_and_reads():
    part = Part.of([(1, 20), (3, 0)])
    assert part == Part(num_sequences=2, num_tokens=4, num_seen=21 + 1 + 2 + 3, num_read=21 + 3, num_copied=32)


def test_transfers_take_the_link_and_one_core():
    found, _ = costs()
    part = Part.of([(1, 10)] * 4)
    up, down, page = (found.of(op, part) for op in ("load_hidden", "offload_qkv", "weights_to_device"))
    q = SMALL.num_heads * SMALL.head_dim * 4
    assert up.num_bytes == 4 * q
    assert up.seconds == pytest.approx(up.num_bytes / LINK)
    assert up.core_s == pytest.approx(TASK_S + up.num_bytes / 1e10)
    assert down.num_bytes == 4 * (q + 2 * SMALL.num_kv_heads * SMALL.head_dim * 4)
    assert page.num_bytes == pytest.approx(COSTS.layers_bytes * 0.75 / SMALL.num_layers / 2)
    staged = found.of("weights_to_pinned", part)
    assert (staged.num_bytes, staged.seconds) == (page.num_bytes, 0.0)
    assert found.of("load_kv", part).num_bytes == 4 * 16 * COSTS.kv_layer_bytes
    assert costs(kv_on_device=1.0)[0].of("load_kv", part).num_bytes == 0


def test_kernels_take_what_the_processor_needs_and_the_pace_is_that_of_the_device():
    part = Part.of([(1, 10)] * 4)
    free, real = costs()
    slow, _ = costs(t4_like(1e6))
    assert free.of("pre_attention", part).kernel_s >= work_seconds(real, COSTS.pre_attention(4))
    for op in ("pre_attention", "post_attention", "cpu_attention", "device_attention"):
        fast, paced = free.of(op, part), slow.of(op, part)
        assert fast.kernel_s == paced.kernel_s
        assert fast.seconds <= fast.kernel_s
        assert paced.seconds > paced.kernel_s


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_every_task_of_every_pipeline_has_a_cost(pipeline):
    found, _ = costs()
    for task in PIPELINES[pipeline].make_tasks(3, 2):
        assert found.of(task.op, Part.of([(1, 10)])).core_s > 0
