from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moeflow.core.errors import CapacityError, CheckpointError, ConfigError
from moeflow.core.hardware import DEVICE, DISK
from moeflow.core.plan import Workload
from moeflow.core.units import GIB
from moeflow.kernels.cpu import extension
from moeflow.planner import planning
from moeflow.planner import resolve as resolving
from moeflow.planner.choices.packed_files import pack
from moeflow.planner.hardware import gpu_figures
from moeflow.planner.hardware.hardware_json import machine_to_json
from moeflow.planner.hardware.host import host_resources
from moeflow.planner.host_forecast import Wanted
from moeflow.planner.planning import PlanRequest, plan_for
from moeflow.planner.usage import Usage
from moeflow.settings.settings import Settings
from tests.planner.example_plans import CONFIG
from tests.planner.examples import machine
from tests.tiny_mixtral import write_tiny_mixtral

WORKLOAD = Workload(prompt_len=20, gen_len=10, max_prompt_len=30)


def usage(**changes):
    return Usage(**{"workload": WORKLOAD, "reserves_kv": True, **changes})


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
    request = PlanRequest(settings=Settings(model=config), usage=usage(num_requests=5), machine=host)
    plan = plan_for(request).plan.config
    assert plan.scheduler.max_num_seqs <= 5
    assert (plan.weight_format, plan.kv_dtype, plan.model_path) == ("bfloat16", "float32", config)


def test_a_memory_limit_goes_along_and_formats_are_those_asked_for(host, config):
    asked = Settings(model=config, quantize="int8", memory_bytes=480 * 2**20, kv_dtype="int8")
    plan = plan_for(PlanRequest(settings=asked, usage=usage(goal="latency"), machine=host)).plan.config
    assert (plan.weight_format, plan.kv_dtype, plan.memory_bytes) == ("int8", "int8", 480 * 2**20)
    assert plan.scheduler.max_num_seqs == 1


def test_what_comes_from_disk_is_read_for_more_prompt_tokens_at_once(host, tmp_path):
    config = str(tmp_path / "config.json")
    Path(config).write_text(json.dumps(CONFIG | {"num_local_experts": 64}))
    long = Workload(prompt_len=1500, gen_len=10, max_prompt_len=1500)

    def chunk(**settings):
        asked = Settings(model=config, **settings)
        return plan_for(
            PlanRequest(settings=asked, usage=usage(workload=long, num_sequences=1), machine=host)
        ).plan.config.scheduler.max_num_batched_tokens

    assert chunk(memory_bytes=600 * 2**20) > 512
    assert chunk() == 512
    assert chunk(memory_bytes=600 * 2**20, max_num_batched_tokens=64) == 64


@pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
def test_a_shape_and_weights_of_that_shape_have_one_plan_within_a_limit(host, tmp_path):
    shape = {"hidden_size": 512, "intermediate_size": 512, "num_local_experts": 64, "max_position_embeddings": 2048}
    write_tiny_mixtral(tmp_path, vocab_size=1000, torch_dtype=torch.bfloat16, **shape)
    short = Workload(prompt_len=100, gen_len=20, max_prompt_len=100)

    def planned(model, **settings):
        asked = Settings(model=str(model), dtype="bfloat16", memory_bytes=480 * 2**20, cache_dir=tmp_path, **settings)
        return plan_for(PlanRequest(settings=asked, usage=usage(workload=short), machine=host)).plan

    plan, of_shape = planned(tmp_path), planned(tmp_path / "config.json")
    assert plan.forecast.expert_places[-1][1] > 0  # on disk
    assert plan.config.scheduler == of_shape.config.scheduler
    assert plan.config.experts.num_slots == of_shape.config.experts.num_slots
    usual = planned(tmp_path, max_num_batched_tokens=512)
    assert plan.config.scheduler.max_num_batched_tokens > 512
    assert plan.forecast.tokens_per_s.value > usual.forecast.tokens_per_s.value


def test_a_described_machine_that_is_too_small_has_experts_on_disk(host, tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG | {"num_local_experts": 512}))
    plan = plan_for(PlanRequest(settings=Settings(model=str(config)), usage=usage(), machine=host)).plan
    assert plan.config.memory.limit_bytes == plan.settings["memory_bytes"] == 2 * 10**9
    assert 0 < plan.config.experts.num_slots < 4 * 512


def test_a_shape_that_is_shipped_is_planned_for_by_name():
    request = PlanRequest(settings=Settings(model="mixtral-8x7b"), usage=usage(num_sequences=64), machine="paper-s1")
    plan = plan_for(request).plan
    assert (plan.config.model_path, plan.config.num_threads) == ("mixtral-8x7b", 0)
    assert (plan.pipeline, plan.config.device) == ("hybrid", "cuda:0")
    assert plan.config.hybrid.num_gpu_experts == plan.forecast.policy.num_gpu_experts


@pytest.mark.parametrize("limit", [{"gpu_memory_bytes": 6 * GIB}, {"device": "cuda:6GiB"}], ids=str)
def test_a_limit_of_device_memory_holds_for_a_described_machine(limit):
    asked = Settings(model="olmoe-1b-7b", **limit)
    plan = plan_for(PlanRequest(settings=asked, usage=usage(num_sequences=8), machine="t4")).plan
    assert plan.config.gpu_memory_bytes == 6 * GIB
    offload = plan.config.offload
    assert (None if offload is None else offload.cuda.memory_bytes) == (6 * GIB if "device" in limit else None)
    assert plan.pipeline == "hybrid" or "device" in limit
    peaks = {it.tier: it.peak_bytes.value for it in plan.forecast.memory}
    assert 0 < peaks[DEVICE] < 6.001 * GIB


def test_no_more_device_memory_is_planned_for_than_a_described_machine_has():
    asked = Settings(model="olmoe-1b-7b", gpu_memory_bytes=80 * GIB)
    with pytest.raises(CapacityError, match=r"limit of 80\.0 GiB is asked for, but"):
        plan_for(PlanRequest(settings=asked, usage=usage(), machine="t4"))


def test_what_has_no_weights_is_refused_with_what_can_be_planned_for(host, config, tmp_path):
    for model, hint in (
        (tmp_path, f"use `moeflow plan {config}"),
        ("mixtral", "without weights are dbrx, gpt-moe, gpt-oss-20b"),
    ):
        with pytest.raises(CheckpointError, match=hint):
            plan_for(PlanRequest(settings=Settings(model=str(model)), usage=usage(), machine=host))


def test_what_is_no_model_is_refused(host):
    for model, error in ((None, ConfigError), ("/nowhere", CheckpointError), ("/nowhere/config.json", CheckpointError)):
        with pytest.raises(error):
            plan_for(PlanRequest(settings=Settings(model=model), usage=usage(), machine=host))


@pytest.mark.parametrize(
    ("device", "complaint"),
    [
        ("cuda:1", "finds no CUDA device here. Plan for a described GPU"),
        ("tpu", "plan for the processor, a GPU"),
    ],
)
def test_devices_that_cannot_be_planned_for_are_refused(config, device, complaint, monkeypatch):
    here = dataclasses.replace(host_resources(), accelerator=None)
    monkeypatch.setattr(planning, "host_resources", lambda *_: here)
    with pytest.raises(ConfigError, match=complaint):
        plan_for(PlanRequest(settings=Settings(model=config, device=device), usage=usage()))


def test_a_device_that_this_machine_emulates_is_on_no_other(config, host):
    with pytest.raises(ConfigError, match="is emulated by this machine; remove --machine"):
        plan_for(PlanRequest(settings=Settings(model=config, device="emulated:1GiB,1"), usage=usage(), machine=host))


def test_a_gpu_of_this_machine_is_measured_and_planned_for(config, monkeypatch, tmp_path):
    here = dataclasses.replace(host_resources(), accelerator="cuda", accelerator_free_bytes=2**31)
    with_gpu = machine(ram=2 * 10**9, device=840 * 10**6)
    level, links = with_gpu.level(DEVICE), [it for it in with_gpu.links if DEVICE in (it.source, it.target)]
    asked = []
    monkeypatch.setattr(planning, "host_resources", lambda *_: here)
    monkeypatch.setattr(planning, "this_machine", lambda *_, **__: machine(ram=2 * 10**9))
    figures = gpu_figures.GpuFigures(level, *links)
    monkeypatch.setattr(gpu_figures, "gpu_figures", lambda *given, **how: asked.append((*given[:2], how)) or figures)
    for device, memory_bytes in (("cuda", 2**31), ("cuda:0:1GiB", 2**30)):
        settings = Settings(model=config, device=device, cache_dir=tmp_path / "not made yet")
        again = device == "cuda"
        plan = plan_for(PlanRequest(settings=settings, usage=usage(), recalibrate=again)).plan
        assert asked.pop() == ("cuda:0", memory_bytes, {"recalibrate": again})
        assert plan.forecast.policy.ffn_on_device
        assert (plan.pipeline == "hybrid") == (device == "cuda")


@pytest.mark.parametrize(
    ("has_driver", "reason"), [(True, "only if --device names it"), (False, "no CUDA device here")]
)
def test_a_shape_is_planned_for_the_processor_beside_a_gpu(config, has_driver, reason, monkeypatch, tmp_path):
    monkeypatch.setattr(planning, "has_gpu_driver", lambda: has_driver)
    monkeypatch.setattr(planning, "this_machine", lambda *_, **__: machine(ram=2 * 10**9))
    plan = plan_for(PlanRequest(settings=Settings(model=config, cache_dir=tmp_path), usage=usage())).plan
    assert plan.config.device == "cpu"
    assert reason in dict(plan.reasons)["device"]


@pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
@pytest.mark.parametrize(("settings", "device"), [({}, "cuda:1"), ({"quantize": "int8"}, "cpu")])
def test_without_an_option_the_device_is_that_of_a_start(settings, device, monkeypatch, tmp_path):
    here = dataclasses.replace(host_resources(), accelerator="cuda:1", accelerator_free_bytes=2**31)
    with_gpu = machine(ram=2 * 10**9, device=2 * 10**9)
    level, links = with_gpu.level(DEVICE), [it for it in with_gpu.links if DEVICE in (it.source, it.target)]
    for module in (planning, resolving):
        monkeypatch.setattr(module, "host_resources", lambda *_: here)
    monkeypatch.setattr(planning, "this_machine", lambda *_, **__: machine(ram=2 * 10**9))
    monkeypatch.setattr(gpu_figures, "gpu_figures", lambda *_, **__: gpu_figures.GpuFigures(level, *links))
    write_tiny_mixtral(tmp_path / "model")
    asked = Settings(model=str(tmp_path / "model"), cache_dir=tmp_path, **settings)
    plan = plan_for(PlanRequest(settings=asked, usage=usage(num_sequences=8))).plan
    assert plan.config.device == device
    assert dict(plan.reasons)["device"].startswith(f"{device}: ")
    started = resolving.resolve(asked).config
    assert (started.device, started.weight_format) == (device, plan.config.weight_format)
    assert plan.forecast.policy.ffn_on_device == (device != "cpu")


@pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
@pytest.mark.parametrize("device_bytes", [840 * 10**6, pytest.param(2 * 10**9, marks=pytest.mark.thorough)])
def test_the_reason_for_a_gpu_is_that_of_its_plan(device_bytes, monkeypatch, tmp_path):
    """A start fits itself to the GPU. A plan for the workload may have no room there for all weights."""
    here = dataclasses.replace(host_resources(), accelerator="cuda:1", accelerator_free_bytes=2**31)
    with_gpu = machine(ram=2 * 10**9, device=device_bytes)
    level, links = with_gpu.level(DEVICE), [it for it in with_gpu.links if DEVICE in (it.source, it.target)]
    for module in (planning, resolving):
        monkeypatch.setattr(module, "host_resources", lambda *_: here)
    monkeypatch.setattr(planning, "this_machine", lambda *_, **__: machine(ram=2 * 10**9))
    monkeypatch.setattr(gpu_figures, "gpu_figures", lambda *_, **__: gpu_figures.GpuFigures(level, *links))
    write_tiny_mixtral(tmp_path / "model")
    asked = Settings(model=str(tmp_path / "model"), cache_dir=tmp_path)
    plan = plan_for(PlanRequest(settings=asked, usage=usage())).plan
    reason = "cuda:1: it holds the model"
    if plan.pipeline != "resident":
        reason += f", but not beside this plan's batch: {plan.pipeline} moves what has no room"
    assert dict(plan.reasons)["device"] == reason
    assert (plan.pipeline == "resident") == (device_bytes > 10**9)


@pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
def test_experts_packed_already_need_no_room_on_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(planning, "this_machine", lambda *_, **__: machine(ram=2 * 10**9))
    monkeypatch.setattr(planning, "shutil", SimpleNamespace(disk_usage=lambda _: SimpleNamespace(free=7)))
    write_tiny_mixtral(tmp_path / "model")
    settings = Settings(model=str(tmp_path / "model"), cache_dir=tmp_path)
    request = PlanRequest(settings=settings, usage=usage())
    costs = plan_for(request).model.costs

    def room(packed_file):
        wanted = Wanted(costs=costs, packed_file=packed_file)
        return planning._measured_here(request, wanted, lambda _: None).level(DISK).capacity_bytes

    assert room(None) == room(tmp_path / "not there") == 7
    pack(settings.model, None, cache_dir=tmp_path, num_threads=1)
    (packed,) = (tmp_path / "experts").glob("*.slabs")
    size = packed.stat().st_size
    assert room(packed) == 7 + size
