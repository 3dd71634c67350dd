from __future__ import annotations

import dataclasses

import pytest

from moeflow.core.engine_config import ExpertSlotsConfig
from moeflow.core.errors import ConfigError
from moeflow.core.offload_config import CudaDeviceConfig, OffloadConfig
from moeflow.core.plan import Workload, plan_from_json, plan_to_json
from tests.planner.example_plans import ENGINE_CONFIG, PLAN

SLOTS = ExpertSlotsConfig(packed_weights_file="experts", num_slots=6, slab_bytes=4096)
OFFLOAD = OffloadConfig(
    cuda=CudaDeviceConfig(name="cuda:0", memory_bytes=2**34, capacity_bytes=2**33),
    pipeline="cgopipe",
    micro_batch_tokens=32,
    prompt_micro_batch_tokens=512,
    num_resident_experts=3,
    num_resident_kv_layers=0,
    window_blocks=0,
)


@pytest.mark.parametrize(
    ("changes", "pipeline"), [({}, "resident"), ({"experts": SLOTS}, "disk-offload"), ({"offload": OFFLOAD}, "cgopipe")]
)
def test_a_plan_survives_json_and_names_what_runs_it(changes, pipeline):
    plan = dataclasses.replace(PLAN, config=dataclasses.replace(ENGINE_CONFIG, **changes), reasons=(("a", "b"),))
    assert plan_from_json(plan_to_json(plan), "file") == plan
    assert plan.pipeline == pipeline
    unknown = dataclasses.replace(plan, forecast=None)
    assert plan_from_json(plan_to_json(unknown), "file") == unknown


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (('"goal": "throughput"', '"goal": "fun"'), "Invalid enum value 'fun' - at `\\$.goal`"),
        (('"num_threads": 3', '"num_threads": "3"'), "Expected `int`, got `str` - at `\\$.config.num_threads`"),
        (('"batch_size"', '"batch_sice"'), "missing required field `batch_size` - at `\\$.forecast.policy`"),
        (
            ('"prefix_caching"', '"prefix_cashing"'),
            r"`\$.config.scheduler.prefix_cashing` \(did you mean 'prefix_caching'",
        ),
        (('"format_version": 3', '"format_version": 1'), "is of version 1, this moeflow reads 3"),
        (('"machine": "this machine"', '"machine": 3'), "Expected `str`, got `int` - at `\\$.machine`"),
    ],
)
def test_a_damaged_plan_is_refused_with_field_and_remedy(change, complaint):
    text = plan_to_json(PLAN)
    assert change[0] in text
    with pytest.raises(ConfigError, match=complaint + ".*Make the plan anew with `moeflow plan --json`"):
        plan_from_json(text.replace(*change), "file")


def test_lengths_of_a_workload():
    workload = Workload(prompt_len=10, gen_len=3, max_prompt_len=20)
    assert (workload.mean_context, workload.max_tokens) == (12.0, 23)
