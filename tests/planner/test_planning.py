from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from moeflow.core.errors import CheckpointError, ConfigError
from moeflow.core.hardware import DISK
from moeflow.core.plan import Workload
from moeflow.kernels.cpu import extension
from moeflow.planner import planning
from moeflow.planner.choices.packed_files import pack
from moeflow.planner.hardware.hardware_json import machine_to_json
from moeflow.planner.planning import PlanRequest, plan_for
from moeflow.planner.settings import Settings
from tests.planner.example_plans import CONFIG
from tests.planner.examples import machine
from tests.tiny_mixtral import write_tiny_mixtral

WORKLOAD = Workload(prompt_len=20, gen_len=10, max_prompt_len=30)


pytestmark = pytest.mark.slow  # each plans several times


@pytest.fixture
def host(tmp_path):
    file = tmp_path / "host.json"
    file.write_text(machine_to_json(machine(ram=2 * 10**9)))
    return str(file)


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    return str(file)


def test_a_bare_config_is_planned_for(host, config):
    request = PlanRequest(settings=Settings(model=config), workload=WORKLOAD, machine=host, num_requests=5)
    plan = plan_for(request).plan
    assert plan.policy.batch_size <= 5
    assert (plan.weight_format, plan.kv_dtype, plan.model) == ("bfloat16", "float32", config)


def test_a_memory_limit_goes_along_and_formats_are_those_asked_for(host, config):
    asked = Settings(model=config, quantize="int8", memory_bytes=480 * 2**20, kv_dtype="int8")
    plan = plan_for(PlanRequest(settings=asked, workload=WORKLOAD, machine=host, goal="latency")).plan
    assert (plan.weight_format, plan.kv_dtype, plan.memory_bytes) == ("int8", "int8", 480 * 2**20)
    assert plan.policy.batch_size == 1


def test_what_comes_from_disk_is_read_for_more_prompt_tokens_at_once(host, config):
    long = Workload(prompt_len=1500, gen_len=10, max_prompt_len=1500)

    def chunk(**settings):
        asked = Settings(model=config, **settings)
        return plan_for(
            PlanRequest(settings=asked, workload=long, machine=host, num_sequences=1)
        ).plan.policy.chunk_tokens

    assert chunk(memory_bytes=420 * 2**20) > 512
    assert chunk() == 512
    assert chunk(memory_bytes=420 * 2**20, max_num_batched_tokens=64) == 64


def test_a_shape_that_is_shipped_is_planned_for_by_name():
    request = PlanRequest(
        settings=Settings(model="mixtral-8x7b"), workload=WORKLOAD, machine="paper-s1", num_sequences=64
    )
    plan = plan_for(request).plan
    assert (plan.model, plan.num_threads) == ("mixtral-8x7b", 0)


def test_what_has_no_weights_is_refused_with_what_can_be_planned_for(host, config, tmp_path):
    for model, hint in (
        (tmp_path, f"say `moeflow plan {config}`"),
        ("mixtral", "without weights are dbrx, mixtral-8x22b"),
    ):
        with pytest.raises(CheckpointError, match=hint):
            plan_for(PlanRequest(settings=Settings(model=str(model)), workload=WORKLOAD, machine=host))


def test_what_is_no_model_is_refused(host):
    for model, error in ((None, ConfigError), ("/nowhere", CheckpointError), ("/nowhere/config.json", CheckpointError)):
        with pytest.raises(error):
            plan_for(PlanRequest(settings=Settings(model=model), workload=WORKLOAD, machine=host))


@pytest.mark.parametrize("device", ["cuda:1", "emulated:1GiB,1"])
def test_devices_that_cannot_be_planned_for_are_refused(config, device):
    with pytest.raises(ConfigError, match=r"Plan for a described one \(--machine t4"):
        plan_for(PlanRequest(settings=Settings(model=config, device=device), workload=WORKLOAD))


@pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
def test_experts_packed_already_need_no_room_on_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(planning, "this_machine", lambda *_, **__: machine(ram=2 * 10**9))
    monkeypatch.setattr(planning, "shutil", SimpleNamespace(disk_usage=lambda _: SimpleNamespace(free=7)))
    write_tiny_mixtral(tmp_path / "model")
    settings = Settings(model=str(tmp_path / "model"), cache_dir=tmp_path)
    request = PlanRequest(settings=settings, workload=WORKLOAD)
    assert plan_for(request).model.machine.level(DISK).capacity_bytes == 7
    pack(settings.model, None, cache_dir=tmp_path, num_threads=1)
    (packed,) = (tmp_path / "experts").glob("*.slabs")
    size = packed.stat().st_size
    assert plan_for(request).model.machine.level(DISK).capacity_bytes == 7 + size
