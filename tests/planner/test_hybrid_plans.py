"""A model that is larger than the GPU: the CPU computes some experts, if the forecast is better."""

from __future__ import annotations

import dataclasses
import re
from contextlib import closing
from math import ceil
from pathlib import Path

import pytest

from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.errors import CapacityError, ConfigError
from moeflow.core.hardware import DEVICE, DISK, RAM
from moeflow.core.plan import DISK_OFFLOAD, HYBRID, Workload, plan_from_json, plan_to_json
from moeflow.core.units import GIB, MIB
from moeflow.kernels.cpu import extension
from moeflow.models.registry import read_bare_config
from moeflow.planner import decision, pipeline_choice, planning
from moeflow.planner.apply_plan import apply_plan
from moeflow.planner.choices import hybrid_choice
from moeflow.planner.choices.offload_plan import costs_of
from moeflow.planner.costs.gpu_work_space import graph_bytes, pass_bytes
from moeflow.planner.costs.routing_profile import RoutingProfile, save_profile
from moeflow.planner.hardware import gpu_figures
from moeflow.planner.hardware.gpu_figures import GpuFigures
from moeflow.planner.hardware.host import HostResources
from moeflow.planner.hardware.machine_files import load_machine
from moeflow.planner.known_routing import popularity_file, routing_file
from moeflow.planner.made_files import made_files
from moeflow.planner.model_files import shipped_models
from moeflow.planner.planning import PlanRequest, plan_for
from moeflow.planner.resolve import resolve
from moeflow.planner.usage import CONVERSATION, OFFLINE, SERVING, Usage
from moeflow.settings.settings import Settings
from tests.planner.gpt_oss_files import write_headers
from tests.planner.holes import write_holes

pytestmark = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())

HERE = HostResources(4, 64 * GIB, 32 * GIB, "cuda:0", 4 * GIB, process_bytes=300 * MIB)
L4 = load_machine("l4")
NUM_EXPERTS, NUM_LAYERS, EXPERT_VALUES = 128, 8, 3 * 2048 * 768


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """Return a model of 9.5 GiB, nearly all of it experts."""
    folder = tmp_path_factory.mktemp("large")
    write_holes(folder, (32000, 2048, 768, NUM_LAYERS, 32, 4, NUM_EXPERTS, 8))
    return str(folder)


def slow_gpu(machine, factor):
    level = machine.level(DEVICE)
    slow = dataclasses.replace(level, read_bytes_per_s=level.read_bytes_per_s / factor)
    return dataclasses.replace(machine, levels=tuple(slow if it is level else it for it in machine.levels))


def planned(model, resources=HERE, machine=L4, usage=SERVING, **settings):
    def machine_of(wanted):
        return machine if machine is None or wanted.device else machine.without_device()

    return resolve(Settings(model=model, **settings), usage, machine_of=machine_of, resources=resources).plan


def with_gpu(num_bytes):
    return dataclasses.replace(HERE, accelerator_free_bytes=num_bytes)


def why(plan) -> str:
    return dict(plan.reasons)["device"]


def test_a_gpu_that_is_asked_for_has_as_many_experts_as_fit(model):
    plan = planned(model, device="cuda:0")
    config, hybrid = plan.config, plan.config.hybrid
    assert (plan.pipeline, config.device, config.cpu_isa, config.offload) == (HYBRID, "cuda:0", "", None)
    assert (hybrid.cpu_weight_format, hybrid.cpu_isa) == ("bfloat16", extension.isa_name())
    assert config.scheduler.max_model_len >= 2048
    assert "the CPU computes some experts, since the weights need" in why(plan)
    slot_bytes = NUM_LAYERS * EXPERT_VALUES * 2
    used = {it.tier: it.peak_bytes.value for it in plan.forecast.memory}
    assert hybrid.num_gpu_experts * slot_bytes + config.kv_cache_bytes < 4 * GIB
    assert (hybrid.num_gpu_experts + 20) * slot_bytes + config.kv_cache_bytes > 3 * GIB
    assert used[RAM] > NUM_LAYERS * NUM_EXPERTS * EXPERT_VALUES * 2
    assert plan.memory_bytes > NUM_LAYERS * NUM_EXPERTS * EXPERT_VALUES * 2
    assert plan.memory_bytes < 32 * GIB
    rates = dict(plan.reasons)["hybrid rates"]
    assert rates.startswith("GPU: reads 300 GB/s, 121 TFLOP/s in bfloat16, a kernel each 10.0 µs; link: 25.0 GB/s ")
    assert re.search(r"; round trip: 30\.0 µs .*; CPU: reads one token's experts in bfloat16 [\d.]+ GB/s$", rates)


@pytest.mark.parametrize("usage", [SERVING, OFFLINE])
def test_without_an_option_the_faster_way_is_taken_and_both_speeds_are_told(model, usage):
    speeds = []
    for device in ("cuda:0", "cpu"):
        forecast = planned(model, usage=usage, device=device).forecast
        decode_s = 127 / forecast.decode_alone_tokens_per_s.value
        alone = 128 / (forecast.time_to_first_token_s.value + decode_s)
        speeds.append(alone if usage is SERVING else forecast.tokens_per_s.value)
    plan = planned(model, usage=usage)
    assert speeds[0] > speeds[1]
    assert (plan.config.device, plan.pipeline) == ("cuda:0", HYBRID)
    told = re.findall(r"([\d.]+) (?:tokens/s|on the CPU)", why(plan))
    assert list(map(float, told)) == pytest.approx(speeds, rel=0.01)


def test_a_gpu_that_holds_the_model_batches_by_its_memory_and_speed(model):
    asked = []

    def measured(wanted):
        asked.append(wanted.device)
        return L4

    def resident(machine_of=measured, free_bytes=22 * GIB, **settings):
        settings = Settings(model=model, device="cuda:0", **settings)
        return resolve(settings, SERVING, machine_of=machine_of, resources=with_gpu(free_bytes)).plan

    plan = resident()
    limits, kv = plan.config.scheduler, plan.config.kv_cache_bytes
    assert (plan.config.hybrid, asked) == (None, ["cuda:0"])
    assert (limits.max_num_seqs, limits.max_num_batched_tokens) == (256, 4096)  # 16 tokens meet an expert in 256
    assert 256 * (512 + 128) * kv / (limits.num_blocks * limits.block_size) <= kv
    assert {"max_num_seqs", "max_num_batched_tokens"} <= dict(plan.reasons).keys()
    unknown = resident(lambda _: None)
    assert (unknown.config.scheduler.max_num_seqs, unknown.config.scheduler.max_num_batched_tokens) == (256, 2048)
    tight = resident(free_bytes=11 * GIB).config.scheduler
    assert tight.max_num_seqs < 256
    fixed = resident(max_num_seqs=7, max_num_batched_tokens=99)
    assert (fixed.config.scheduler.max_num_seqs, fixed.config.scheduler.max_num_batched_tokens) == (7, 99)
    assert asked == ["cuda:0"] * 2


def test_a_gpu_that_does_not_help_is_left_unused(model):
    machine = slow_gpu(L4, 100)
    plan = planned(model, machine=machine)
    assert plan.config == planned(model, device="cpu").config
    assert re.match(
        r"cpu: cuda:0 is smaller than the model, .*: [\d.]+ tokens/s expected, [\d.]+ with cuda:0", why(plan)
    )
    for asked in ({"device": "cuda:0"}, {"gpu_memory_bytes": 3 * GIB}):
        assert planned(model, machine=machine, **asked).pipeline == HYBRID


def test_plans_for_a_described_machine_are_those_of_a_start(model):
    plan = planned(model, resources=with_gpu(4 * 10**9), usage=CONVERSATION, device="cuda:0", max_num_seqs=1)
    asked = Settings(model=model, device="cuda:0", gpu_memory_bytes=4 * 10**9)
    found = plan_for(PlanRequest(settings=asked, usage=CONVERSATION, machine="l4"))
    described = found.plan
    assert described.pipeline == plan.pipeline == HYBRID
    assert described.config.weight_format == plan.config.weight_format
    short = described.config.kv_cache_bytes, plan.config.kv_cache_bytes  # of the workload; of usual requests
    assert short[0] < short[1]
    more = (short[1] - short[0]) / (NUM_LAYERS * EXPERT_VALUES * 2)
    numbers = described.config.hybrid.num_gpu_experts, plan.config.hybrid.num_gpu_experts
    assert numbers[0] - numbers[1] == pytest.approx(more, abs=2)
    again = found.estimator.predict(1, 512, 128)
    assert described.forecast.decode_alone_tokens_per_s.value == pytest.approx(1 / again.decode_s)
    assert described.forecast.time_to_first_token_s.value == pytest.approx(again.first_token_s)


def test_main_memory_of_a_described_machine_can_be_limited(model):
    def memory(**limits):
        asked = Settings(model=model, gpu_memory_bytes=4 * 10**9, **limits)
        return plan_for(PlanRequest(settings=asked, usage=CONVERSATION, machine="l4")).plan.config.memory

    assert memory() is None
    limited = memory(memory_bytes=12 * GIB)
    assert limited.limit_bytes == 12 * GIB
    assert 9 * GIB < limited.weight_bytes < 10 * GIB
    assert 1 * GIB < memory(memory_bytes=3 * GIB, quantize="int8").weight_bytes < 3 * GIB
    with pytest.raises(CapacityError, match=r"the model needs .* of memory, but there are 500\.0 MiB"):
        memory(memory_bytes=500 * MIB, quantize="int8")


def test_without_a_known_speed_the_cpu_computes(model):
    assert planned(model, machine=None).config.device == "cpu"
    hybrid = planned(model, machine=None, device="cuda:0").config.hybrid
    assert hybrid.num_gpu_experts > 0
    assert hybrid.stream_tokens == 0


def test_what_the_cpu_does_not_run_alone_is_shared_with_it(model):
    plan = planned(model, dtype="float16")
    assert (plan.pipeline, plan.config.dtype, plan.config.hybrid.cpu_weight_format) == (HYBRID, "float16", "bfloat16")


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_quantized_experts_have_one_format_on_both(model, quantize):
    config = planned(model, resources=with_gpu(2 * GIB), quantize=quantize, device="cuda:0").config
    assert config.weight_format == config.hybrid.cpu_weight_format == quantize
    assert config.hybrid.num_gpu_experts > 0


@pytest.mark.parametrize("has_bfloat16", [True, False])
def test_blocks_of_a_file_stay_on_both(tmp_path, has_bfloat16):
    packed = write_headers(tmp_path / "packed", num_layers=24, num_experts=32)
    here = dataclasses.replace(with_gpu(8 * GIB), has_bfloat16=has_bfloat16)
    plan = planned(packed, resources=here, device="cuda:0")
    config = plan.config
    assert (plan.pipeline, config.weight_format, config.hybrid.cpu_weight_format) == (HYBRID, "mxfp4", "mxfp4")
    assert {(it.up, it.down) for it in config.layer_formats} == {("mxfp4", "mxfp4")}
    assert {it.q_proj for it in config.layer_formats} == {"bfloat16" if has_bfloat16 else "float16"}
    expert_bytes = 3 * 2880 * 2880 * 4.25 / 8
    assert plan.memory_bytes == pytest.approx(24 * 32 * expert_bytes, rel=0.12)
    assert 0 < config.hybrid.num_gpu_experts < 32
    described = plan_for(
        PlanRequest(settings=Settings(model=packed, gpu_memory_bytes=8 * GIB), usage=CONVERSATION, machine="l4")
    )
    assert described.plan.config.hybrid.cpu_weight_format == "mxfp4"


def test_formats_that_the_gpu_cannot_take_from_the_cpu_become_floats(tmp_path, monkeypatch):
    packed = write_headers(tmp_path / "packed", num_layers=24, num_experts=32)
    monkeypatch.setattr(hybrid_choice, "FORMATS", ("float32", "bfloat16"))
    large = dataclasses.replace(with_gpu(8 * GIB), available_bytes=48 * GIB)
    config = planned(packed, resources=large, device="cuda:0").config
    assert (config.weight_format, config.hybrid.cpu_weight_format, config.layer_formats) == ("bfloat16", "bfloat16", ())


def test_more_memory_of_the_gpu_is_never_slower(model):
    plans = [planned(model, resources=with_gpu(size * GIB // 2), device="cuda:0") for size in range(4, 22)]
    shared = [plan for plan in plans if plan.pipeline == HYBRID]
    assert shared == plans[: len(shared)]
    numbers = [plan.config.hybrid.num_gpu_experts for plan in shared]
    speeds = [plan.forecast.decode_alone_tokens_per_s.value for plan in shared]
    assert numbers == sorted(numbers)
    assert speeds == sorted(speeds)
    assert numbers[-1] > 80


def test_a_gpu_that_holds_the_model_computes_all_of_it(model):
    plan = planned(model, resources=with_gpu(24 * GIB))
    assert (plan.config.device, plan.config.hybrid) == ("cuda:0", None)
    assert why(plan) == "cuda:0: it holds the model"


def test_both_kinds_of_memory_can_be_limited(model):
    plan = planned(model, gpu_memory_bytes=3 * GIB, memory_bytes=12 * GIB)
    config = plan.config
    assert (config.gpu_memory_bytes, config.memory_bytes, plan.pipeline) == (3 * GIB, 12 * GIB, HYBRID)
    assert plan.memory_bytes <= 12 * GIB
    more = planned(model, gpu_memory_bytes=4 * GIB, memory_bytes=12 * GIB)
    assert more.config.hybrid.num_gpu_experts > config.hybrid.num_gpu_experts


def test_too_little_main_memory_is_refused_with_need_and_remedy(model):
    little = dataclasses.replace(HERE, available_bytes=6 * GIB)
    need = r"all experts must be in memory, .* 9\.0 GiB in bfloat16 and the process .* but 6\.0 GiB are free: "
    with pytest.raises(
        CapacityError, match=need + r"use --quantize int8 .*, free memory, or limit memory \(--memory\)"
    ):
        planned(model, resources=little, device="cuda:0")
    with pytest.raises(CapacityError, match=r"are left for experts, .* Raise the memory limit \(--memory\)"):
        planned(model, memory_bytes=GIB, device="cuda:0")


def test_experts_without_room_in_main_memory_come_from_disk(model):
    plan = planned(model, memory_bytes=6 * GIB, device="cuda:0")
    config, forecast = plan.config, plan.forecast
    num_on_gpu, num_experts = config.hybrid.num_gpu_experts, NUM_LAYERS * NUM_EXPERTS
    assert (plan.pipeline, config.experts.predictor, config.experts.slab_bytes) == (HYBRID, "none", 2 * EXPERT_VALUES)
    num_held = (config.memory.weight_bytes - 4 * 2048 * 2048 * 4) // (2 * EXPERT_VALUES)
    assert config.experts.num_slots == num_held - (1 + 2 * 7)  # on their way to the GPU
    assert 5.9 * GIB < plan.memory_bytes <= config.memory_bytes == 6 * GIB
    on_disk = 1 - (num_on_gpu * NUM_LAYERS + config.experts.num_slots) / num_experts
    assert 0.05 < on_disk < 0.5
    assert forecast.policy.experts_on_disk == pytest.approx(on_disk)
    places = dict(forecast.expert_places)
    assert places[DISK] == pytest.approx(on_disk, abs=1e-5)
    assert places[DEVICE] == pytest.approx(num_on_gpu / NUM_EXPERTS, abs=1e-5)
    assert sum(places.values()) == pytest.approx(1, abs=1e-5)
    assert dict(forecast.busy)["disk"] > 0
    decode_s = 1 / forecast.decode_alone_tokens_per_s.value
    read_s = NUM_LAYERS * 8 * on_disk * 2 * EXPERT_VALUES / L4.link(DISK, RAM).peak_bytes_per_s
    assert read_s < decode_s < 3 * read_s
    assert "the others come from" in dict(plan.reasons)["experts"]
    assert "read if routers choose evenly" in dict(plan.reasons)["experts_on_disk"]
    assert apply_plan(plan_from_json(plan_to_json(plan), "plan"), {}, resources=HERE) == plan
    described = plan_for(
        PlanRequest(
            settings=Settings(model=model, gpu_memory_bytes=4 * GIB, memory_bytes=6 * GIB), usage=SERVING, machine="l4"
        )
    ).plan
    assert described.config.experts.slab_bytes == config.experts.slab_bytes
    assert described.config.experts.num_slots == pytest.approx(config.experts.num_slots, rel=0.2)
    assert described.forecast.policy.experts_on_disk > 0.05


@pytest.mark.parametrize("usage", [SERVING, OFFLINE])
def test_more_main_memory_is_never_slower(model, usage):
    sizes = [2 * GIB, *range(3 * GIB, 12 * GIB, GIB)]
    plans = [planned(model, usage=usage, memory_bytes=size, device="cuda:0") for size in sizes]
    assert {plan.pipeline for plan in plans} == {HYBRID}
    slots = [0 if plan.config.experts is None else plan.config.experts.num_slots for plan in plans]
    has_all = slots.index(0)
    assert slots[:has_all] == sorted(slots[:has_all])
    assert not any(slots[has_all:])
    name = "decode_alone_tokens_per_s" if usage is SERVING else "tokens_per_s"
    speeds = [getattr(plan.forecast, name).value for plan in plans]
    assert speeds == sorted(speeds)
    assert speeds[-1] > 5 * speeds[0]


def test_little_memory_of_both_kinds_beats_the_processor_with_the_disk(model):
    shared, alone = (planned(model, memory_bytes=6 * GIB, device=device) for device in ("auto", "cpu"))
    assert (shared.pipeline, shared.config.device, alone.pipeline) == (HYBRID, "cuda:0", DISK_OFFLOAD)
    assert shared.config.experts is not None
    speeds = [plan.forecast.decode_alone_tokens_per_s.value for plan in (shared, alone)]
    assert speeds[0] > 1.2 * speeds[1]
    slow = planned(model, machine=slow_gpu(L4, 1000), memory_bytes=6 * GIB)
    assert slow.config.device == "cpu"


def test_a_gpu_without_room_for_other_weights_is_refused(model):
    with pytest.raises(CapacityError, match=r"without experts, the model needs .*, but 700\.0 MiB of cuda:0 are free"):
        planned(model, resources=with_gpu(700 * MIB), device="cuda:0")
    plan = planned(model, resources=with_gpu(700 * MIB))
    assert plan.config.device == "cpu"
    assert "nor can the CPU compute some of the experts" in why(plan)


@pytest.mark.parametrize("is_measured", [True, False])
def test_a_start_measures_the_gpu_apart(model, tmp_path, monkeypatch, is_measured):
    level, there, back = L4.level(DEVICE), L4.link(RAM, DEVICE), L4.link(DEVICE, RAM)
    asked = []

    def figures(name, memory_bytes, *_, **__):
        asked.append((name, memory_bytes))
        if not is_measured:
            raise ConfigError("no answer")
        return gpu_figures.GpuFigures(level, there, back)

    monkeypatch.setattr(gpu_figures, "gpu_figures", figures)
    monkeypatch.setattr(planning, "machine_for_start", lambda *_, **__: L4.without_device())
    told = []
    plan = planning.plan_for_start(Settings(model=model, cache_dir=tmp_path), SERVING, told.append, HERE)
    assert asked == [("cuda:0", 4 * GIB)]
    assert "cuda:0 and its link" in told
    assert (plan.pipeline == HYBRID) == is_measured
    forced = planning.plan_for_start(Settings(model=model, cache_dir=tmp_path, device="cuda"), SERVING, resources=HERE)
    assert forced.pipeline == HYBRID
    assert (forced.forecast is not None) == is_measured


def test_as_many_requests_as_people_can_follow_run_at_once(model):
    numbers = []
    for factor in (1, 30, 100):
        ram = L4.level(RAM)
        peaks = tuple((dtype, peak / factor) for dtype, peak in ram.processor.peak_flops_per_s)
        slow = dataclasses.replace(ram, processor=dataclasses.replace(ram.processor, peak_flops_per_s=peaks))
        machine = dataclasses.replace(L4, levels=tuple(slow if it is ram else it for it in L4.levels))
        plan = planned(model, machine=machine, device="cuda:0")
        numbers.append(plan.config.scheduler.max_num_seqs)
        limit_s = max(0.25, 4 / plan.forecast.decode_alone_tokens_per_s.value)
        assert numbers[-1] == 8 or plan.forecast.time_per_token_s.value < limit_s
        assert f"{numbers[-1]}: each then gets" in dict(plan.reasons)["max_num_seqs"]
        kv_bytes = (512 + 128) * plan.config.kv_cache_bytes / (plan.config.scheduler.num_blocks * 16)
        assert numbers[-1] * kv_bytes <= plan.config.kv_cache_bytes
    assert 256 >= numbers[0] > 32 > numbers[1] > numbers[2]
    assert planned(model, device="cuda:0", max_num_seqs=50).config.scheduler.max_num_seqs == 50


def test_learnt_popularity_is_used(model, tmp_path):
    with closing(open_checkpoint(model)) as checkpoint:
        profile, choices = routing_file(checkpoint, tmp_path), popularity_file(checkpoint, tmp_path)
    even = planned(model, device="cuda:0", cache_dir=tmp_path)
    assert even.config.hybrid.popularity_file == ""
    save_profile(RoutingProfile(cold=(0.0, 0.01, 0.05, 0.2, 0.6)), profile)
    choices.touch()
    plan = planned(model, device="cuda:0", cache_dir=tmp_path)
    assert plan.config.hybrid.popularity_file == str(choices)
    assert plan.forecast.decode_alone_tokens_per_s.value > 1.1 * even.forecast.decode_alone_tokens_per_s.value
    assert str(choices) in plan.config.needed_files
    assert choices in made_files(Path(model), tmp_path)


def test_packed_experts_are_used(model, tmp_path, monkeypatch):
    assert planned(model, device="cuda:0").config.hybrid.packed_experts_file == ""
    asked, file = [], tmp_path / "packed"
    monkeypatch.setattr(decision, "find_packed_experts", lambda _, formats, folder: asked.append(formats) or file)
    plan = planned(model, device="cuda:0", cache_dir=tmp_path)
    assert plan.config.hybrid.packed_experts_file == str(file)
    assert dict(plan.reasons)["start"] == f"experts are read from {file}, as `moeflow pack` left them"
    assert {it.matrices for it in asked} == {plan.config.hybrid.cpu_weight_format}


def test_pipelines_stay_where_they_are_asked_for(model, monkeypatch):
    figures = GpuFigures(L4.level(DEVICE), L4.link(RAM, DEVICE), L4.link(DEVICE, RAM))
    monkeypatch.setattr(pipeline_choice, "gpu_figures", lambda *_: figures)
    for asked in ({"device": "cuda:4GiB"}, {"device": "cuda:0", "pipeline": "cgopipe"}):
        assert planned(model, machine=L4.without_device(), **asked).config.offload is not None


@pytest.mark.slow  # plans
@pytest.mark.parametrize(
    ("name", "shape", "quantize"),
    [
        ("l4", "qwen3-30b-a3b", None),
        ("t4", "qwen3-30b-a3b", "int4"),
        ("paper-s1", "mixtral-8x7b", None),
        ("paper-s2", "mixtral-8x7b", "int8"),
        ("l4", "dbrx", "int4"),
    ],
)
@pytest.mark.parametrize("number", [1, 16])
def test_plans_for_described_machines_fit(name, shape, quantize, number):
    load = Workload(prompt_len=418, gen_len=128, max_prompt_len=418)
    usage = Usage(workload=load, goal="latency", num_sequences=number)
    plan = plan_for(PlanRequest(settings=Settings(model=shape, quantize=quantize), usage=usage, machine=name)).plan
    config, hybrid, machine = plan.config, plan.config.hybrid, load_machine(name)
    assert (plan.pipeline, config.scheduler.max_num_seqs, config.experts) == (HYBRID, number, None)
    assert plan.forecast.policy.num_gpu_experts == hybrid.num_gpu_experts
    assert f"experts in {hybrid.cpu_weight_format} " in dict(plan.reasons)["hybrid rates"]
    costs = costs_of(read_bare_config(shipped_models()[shape]), config)
    expert_bytes, num_experts = costs.expert_bytes, costs.shape.routing.num_experts
    slots = costs.num_moe_layers * hybrid.num_gpu_experts * expert_bytes
    staged = hybrid.staging_bytes(num_experts, ceil(expert_bytes), ceil(expert_bytes))
    kv = number * 35 * 16 * costs.kv_bytes  # 546 tokens in whole blocks
    assert config.kv_cache_bytes == pytest.approx(kv, rel=0.01)
    held = costs.model_bytes - costs.experts_bytes + slots + staged + kv
    work = graph_bytes(costs, number) + pass_bytes(costs, num_tokens=2048, num_sampled=number)
    room = machine.level(DEVICE).capacity_bytes - 512 * MIB
    assert held + work <= room
    one_more = costs.num_moe_layers * expert_bytes
    assert held + work + 1.01 * one_more > room or hybrid.num_gpu_experts == num_experts - 1
    assert costs.experts_bytes + 512 * MIB < plan.memory_bytes < machine.level(RAM).capacity_bytes
    alone = plan.forecast.decode_alone_tokens_per_s.value
    read = costs.num_moe_layers * costs.shape.routing.top_k * (1 - hybrid.num_gpu_experts / num_experts) * expert_bytes
    assert alone < machine.level(RAM).read_bytes_per_s / read


def test_a_plan_is_carried_out_where_there_is_room(model):
    plan = planned(model, gpu_memory_bytes=3 * GIB)
    again = plan_from_json(plan_to_json(plan), "plan")
    assert again == plan
    assert apply_plan(again, {}, resources=HERE).config == plan.config
    with pytest.raises(CapacityError, match=r"device memory limit of 3\.0 GiB"):
        apply_plan(again, {}, resources=with_gpu(2 * GIB))
    with pytest.raises(CapacityError, match=r"the plan needs .* of memory, but 4\.0 GiB are free"):
        apply_plan(again, {}, resources=dataclasses.replace(HERE, available_bytes=4 * GIB))
