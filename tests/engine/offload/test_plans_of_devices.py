"""A plan for a machine with two devices runs as it is printed, on emulated ones, with the plain run's tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moeflow.core.offload_config import EmulatedDeviceConfig, EmulatedSpeeds
from moeflow.core.plan import Workload, plan_from_json, plan_to_json
from moeflow.kernels.cpu import extension
from moeflow.planner import described
from moeflow.planner.costs.cost_model import DEVICE_RESERVE_BYTES
from moeflow.planner.usage import Usage
from moeflow.settings.settings import Settings
from tests.engine.offload.offloaded_runs import config, run
from tests.engine.ranks.conftest import in_threads
from tests.planner.examples import machine
from tests.tiny_mixtral import write_tiny_mixtral

__all__ = ["in_threads"]  # a fixture

LENGTHS = (5, 1, 20)
MB = 10**6
pytestmark = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())


@pytest.mark.parametrize("free", [MB // 2, 3 * MB // 4])
def test_a_plan_for_two_devices_runs_as_printed(tmp_path, in_threads, monkeypatch, free):
    monkeypatch.setattr(described, "can_be_hybrid", lambda *_: False)
    write_tiny_mixtral(tmp_path, num_local_experts=8, num_hidden_layers=3, intermediate_size=96)
    where = machine(ram=10**10, device=DEVICE_RESERVE_BYTES + free, link=1e9, num_devices=2)
    usage = Usage(workload=Workload(prompt_len=20, gen_len=8, max_prompt_len=20), num_sequences=4)
    settings = Settings(model=str(tmp_path), dtype="float32", device="cuda", num_threads=2)
    plan = plan_from_json(plan_to_json(described.plan_described(settings, usage, lambda _: where).plan), "it")
    offload, parallel = plan.config.offload, plan.config.parallel
    assert offload is not None
    assert (parallel.num_ranks, plan.settings["num_ranks"]) == (2, 2)

    emulated = EmulatedDeviceConfig(
        capacity_bytes=offload.cuda.capacity_bytes, speeds=EmulatedSpeeds(link=1e12), computes_in_torch=True
    )
    printed = replace(plan.config, offload=replace(offload, cuda=None, emulated=emulated), gpu_memory_bytes=0)
    assert run(printed, LENGTHS, 3) == run(config(str(tmp_path)), LENGTHS, 3)
