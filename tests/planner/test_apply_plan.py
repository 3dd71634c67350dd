"""Plans become settings; explicit settings stay; plans for something else are refused with what to do."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from moeflow.core.engine_config import ExpertSlotsConfig, MemoryPlan
from moeflow.core.errors import ConfigError
from moeflow.core.parallel_config import ParallelConfig
from moeflow.kernels.cpu import extension
from moeflow.planner.apply_plan import machine_notice, overruled, settings_from_plan, settings_of
from moeflow.planner.hardware.host import host_resources
from moeflow.planner.hardware.this_machine import machine_identity
from moeflow.planner.resolve import resolve
from moeflow.planner.settings import Settings
from tests.planner.example_plans import ENGINE_CONFIG, MODEL, PLAN
from tests.tiny_mixtral import write_tiny_mixtral


def with_config(**changes):
    return dataclasses.replace(PLAN, config=dataclasses.replace(ENGINE_CONFIG, **changes))


def test_all_that_a_plan_decides_becomes_settings():
    assert settings_from_plan(PLAN, Settings()) == Settings(
        model=MODEL,
        device="cpu",
        quantize="int8",
        kv_dtype="bfloat16",
        num_threads=3,
        max_num_seqs=6,
        max_num_batched_tokens=128,
    )
    assert overruled(PLAN, Settings(model=MODEL)) == []


def test_lengths_of_a_plan_s_workload_do_not_bound_requests():
    assert settings_from_plan(PLAN, Settings()).max_model_len is None
    explicit = Settings(max_model_len=512, kv_cache_bytes=2 << 20)
    found = settings_from_plan(PLAN, explicit)
    assert (found.max_model_len, found.kv_cache_bytes) == (512, 2 << 20)
    assert overruled(PLAN, explicit) == []


@pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"dtype": "bfloat16", "max_num_seqs": 5, "prefix_caching": False},
        {"quantize": "int4", "kv_dtype": "int8", "num_threads": 1, "max_model_len": 64},
        {"memory_bytes": 1 << 30},
        {"num_ranks": 2, "num_threads": 4},
        {"num_ranks": 3, "num_threads": 4, "listen_ranks": "[::1]:9200"},
        {"num_ranks": 2, "listen_ranks": "9200", "cluster_token_file": Path("/etc/token")},
        {"num_ranks": 2, "listen_ranks": "9200", "ray_address": "auto", "is_served": True},
        {
            "num_ranks": 2,
            "listen_ranks": "9200",
            "ray_address": "10.0.0.1:6379",
            "ray_placement": "spread",
            "is_served": True,
        },
        {"device": "emulated:64MiB,1,t4", "pipeline": "flexgen", "micro_batch": 4},
        {"device": "emulated:64MiB,0.5,torch"},
    ],
)
def test_a_configuration_is_decided_again_from_its_settings(tmp_path, asked):
    write_tiny_mixtral(tmp_path)
    here = dataclasses.replace(host_resources(), process_bytes=200 << 20)  # this process may have grown by other tests

    def config_of(settings):
        return resolve(settings, resources=here).config

    config = config_of(Settings(model=str(tmp_path), kv_cache_bytes=1 << 20, cache_dir=tmp_path, **asked))
    same = {"cache_dir": tmp_path, "is_served": asked.get("is_served", False)}
    again = config_of(dataclasses.replace(settings_of(config), **same))
    own = {"is_wide": again.is_wide, "is_own_precision": again.is_own_precision}
    assert again == dataclasses.replace(config, **own)


def test_what_the_user_set_stays_and_is_reported():
    explicit = Settings(model=MODEL, max_num_seqs=2, kv_dtype="bfloat16")
    assert settings_from_plan(PLAN, explicit).max_num_seqs == 2
    assert overruled(PLAN, explicit) == [("max_num_seqs", 2, 6)]


@pytest.mark.parametrize("explicit", [{"dtype": "bfloat16"}, {"quantize": "int4"}, {"quantize": "q4_k_m"}])
def test_formats_are_set_by_one_of_them(explicit):
    settings = settings_from_plan(PLAN, Settings(**explicit))
    assert (settings.dtype, settings.quantize) == (explicit.get("dtype", "auto"), explicit.get("quantize"))
    assert [name for name, _, _ in overruled(PLAN, Settings(**explicit))] == list(explicit)


def test_a_mix_is_asked_for_again():
    settings = settings_from_plan(with_config(weight_format="iq4_nl", mix="q4_k"), Settings())
    assert (settings.dtype, settings.quantize) == ("auto", "q4_k")


def test_a_checkpoints_own_formats_are_left_to_be_found_again():
    for is_wide in (False, True):
        settings = settings_from_plan(with_config(is_own_precision=True, is_wide=is_wide), Settings())
        assert (settings.dtype, settings.quantize, settings.exact_activations) == ("auto", None, is_wide)


def test_experts_from_disk_keep_to_the_memory_and_the_policies_that_were_planned_with():
    slots = ExpertSlotsConfig(
        packed_weights_file="x", num_slots=6, slab_bytes=4096, policy="lru", predictor="frequency"
    )
    memory = MemoryPlan(limit_bytes=5 << 20, process_bytes=1, weight_bytes=1, work_bytes=1)
    settings = settings_from_plan(with_config(experts=slots, memory=memory), Settings())
    assert (settings.memory_bytes, settings.expert_policy, settings.predictor) == (5 << 20, "lru", "frequency")


def test_processes_share_the_model_as_was_planned():
    parallel = ParallelConfig(num_ranks=3, expert_layout="sliced", attention_layout="tensor")
    settings = settings_from_plan(with_config(parallel=parallel), Settings())
    assert (settings.num_ranks, settings.expert_layout, settings.attention_layout) == (3, "sliced", "tensor")


@pytest.mark.parametrize(
    ("changes", "explicit", "complaint"),
    [
        ({}, {"model": "other"}, "not for other: make one for this model, `moeflow plan other --json`"),
        ({"model_path": "/models/config.json"}, {}, "without weights: make one for a folder"),
        ({"model_path": "mixtral-8x7b"}, {"model": None}, "without weights: make one for a folder"),
    ],
)
def test_plans_for_something_else_are_refused(changes, explicit, complaint):
    with pytest.raises(ConfigError, match=complaint):
        settings_from_plan(with_config(**changes), Settings(**explicit))


def test_a_plan_of_another_machine_is_reported():
    here = dataclasses.replace(PLAN, machine_identity=machine_identity(3))
    assert machine_notice(here, Settings()) is None
    assert "with --threads 2" in (machine_notice(here, Settings(num_threads=2)) or "")
    notice = machine_notice(dataclasses.replace(PLAN, machine="t4"), Settings())
    assert notice is not None
    assert "made for t4, not for this one" in notice


def test_engines_of_a_plan_are_as_many_again_and_share_what_they_shared():
    plan = dataclasses.replace(with_config(num_threads=3, memory=None), num_replicas=2)
    found = settings_from_plan(plan, Settings())
    assert (found.num_replicas, found.num_threads) == (2, 6)
    assert overruled(plan, Settings(num_replicas=3)) == [("num_replicas", 3, 2)]
    limit = MemoryPlan(limit_bytes=1 << 30, process_bytes=0, weight_bytes=0, work_bytes=0)
    limited = dataclasses.replace(with_config(memory=limit), num_replicas=2)
    with pytest.raises(ConfigError, match=r"2 engines within a limit.*--memory"):
        settings_from_plan(limited, Settings())
    assert settings_from_plan(limited, Settings(memory_bytes=2 << 30)).memory_bytes == 2 << 30
