"""Plans become settings; explicit settings stay; plans for something else are refused with what to do."""

from __future__ import annotations

import dataclasses

import pytest

from moeflow.core.errors import ConfigError
from moeflow.core.plan import DISK_OFFLOAD
from moeflow.planner.apply_plan import machine_notice, overruled, settings_from_plan
from moeflow.planner.hardware.this_machine import machine_identity
from moeflow.planner.settings import Settings
from tests.planner.example_plans import MODEL, PLAN


def test_all_that_a_plan_decides_becomes_settings():
    assert settings_from_plan(PLAN, Settings()) == Settings(
        model=MODEL,
        device="cpu",
        quantize="int8",
        kv_dtype="bfloat16",
        num_threads=3,
        max_model_len=40,
        max_num_seqs=6,
        max_num_batched_tokens=128,
        kv_cache_bytes=1 << 20,
    )
    assert overruled(PLAN, Settings(model=MODEL)) == []


def test_what_the_user_said_stays_and_is_told():
    explicit = Settings(model=MODEL, max_num_seqs=2, kv_dtype="bfloat16")
    assert settings_from_plan(PLAN, explicit).max_num_seqs == 2
    assert overruled(PLAN, explicit) == [("max_num_seqs", 2, 6)]


@pytest.mark.parametrize("explicit", [{"dtype": "bfloat16"}, {"quantize": "int4"}])
def test_formats_are_said_by_one_of_them(explicit):
    settings = settings_from_plan(PLAN, Settings(**explicit))
    assert (settings.dtype, settings.quantize) == (explicit.get("dtype", "auto"), explicit.get("quantize"))
    assert [name for name, _, _ in overruled(PLAN, Settings(**explicit))] == list(explicit)


def test_experts_from_disk_keep_to_the_memory_that_was_planned_with():
    assert settings_from_plan(dataclasses.replace(PLAN, pipeline=DISK_OFFLOAD), Settings()).memory_bytes == 1 << 30
    assert settings_from_plan(dataclasses.replace(PLAN, memory_bytes=5 << 20), Settings()).memory_bytes == 5 << 20


@pytest.mark.parametrize(
    ("changes", "explicit", "complaint"),
    [
        ({}, {"model": "other"}, "not for other: make one for this model, `moeflow plan other --json`"),
        ({}, {"device": "emulated:1GiB,1"}, "--device says emulated:1GiB,1: leave one of them away"),
        ({"pipeline": "magic"}, {}, "pipeline is 'magic': use one of resident, disk-offload, cgopipe"),
        ({"model": "/models/config.json"}, {}, "without weights: make one for a folder"),
        ({"model": "mixtral-8x7b"}, {"model": None}, "without weights: make one for a folder"),
        (
            {"policy": dataclasses.replace(PLAN.policy, ffn_on_device=True), "machine": "t4"},
            {},
            "for t4, which has a device: make one for this machine",
        ),
    ],
)
def test_plans_for_something_else_are_refused(changes, explicit, complaint):
    with pytest.raises(ConfigError, match=complaint):
        settings_from_plan(dataclasses.replace(PLAN, **changes), Settings(**explicit))


def test_a_plan_of_another_machine_is_told():
    here = dataclasses.replace(PLAN, machine_identity=machine_identity(3))
    assert machine_notice(here, Settings()) is None
    assert "with --threads 2" in (machine_notice(here, Settings(num_threads=2)) or "")
    notice = machine_notice(dataclasses.replace(PLAN, machine="t4"), Settings())
    assert notice is not None
    assert "made for t4, not for this one" in notice
