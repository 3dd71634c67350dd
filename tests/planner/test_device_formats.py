"""Weights on a GPU are in a float type that it computes fast: by its own types, and by those of the file."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import MixtralConfig

from moeflow.cli.plan.output import policy_table
from moeflow.core.engine_messages import Submission
from moeflow.core.errors import CapacityError, ConfigError
from moeflow.core.plan import Workload
from moeflow.core.sampling_params import SamplingParams
from moeflow.core.units import GIB
from moeflow.engine.engine import Engine
from moeflow.kernels.cpu import extension
from moeflow.planner.hardware.hardware_json import machine_to_json
from moeflow.planner.hardware.host import HostResources
from moeflow.planner.hardware.machine_files import load_machine
from moeflow.planner.planning import PlanRequest, plan_for
from moeflow.planner.resolve import resolve
from moeflow.planner.usage import Usage
from moeflow.settings.settings import Settings
from tests.checkpoint.tiny_models import random_weights, write_gguf
from tests.models.parity import SHAPE, random_model
from tests.planner.example_plans import CONFIG
from tests.planner.gpt_oss_files import write_headers
from tests.tiny_mixtral import write_tiny_mixtral

NEW = HostResources(4, 32 * GIB, 16 * GIB, "cuda:0", 8 * GIB)
OLD = dataclasses.replace(NEW, has_bfloat16=False)
CPU = HostResources(4, 32 * GIB, 16 * GIB, None, 0)


@pytest.fixture(scope="module", params=["float32", "bfloat16", "float16"])
def stored(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    config = MixtralConfig(**SHAPE, num_local_experts=4)
    random_model(config).to(getattr(torch, request.param)).save_pretrained(folder)
    return request.param, str(folder)


def config(model, machine, **settings):
    return resolve(Settings(model=model, **settings), resources=machine).config


def test_a_file_s_own_type_is_kept_where_the_gpu_is_fast_in_it(stored):
    dtype, model = stored
    for machine, expected in ((NEW, dtype), (OLD, "float16" if dtype == "bfloat16" else dtype)):
        found = config(model, machine)
        assert (found.device, found.dtype, found.weight_format, found.kv_dtype) == ("cuda:0", *[expected] * 3)
        streamed = config(model, machine, device="cuda:2GiB")
        assert (streamed.dtype, streamed.kv_dtype) == (expected, "bfloat16" if expected == "float16" else expected)


def test_a_quantized_file_keeps_its_blocks_and_computes_in_half(tmp_path):
    file = tmp_path / "tiny.gguf"
    write_gguf(file, "mixtral", random_weights("mixtral"), GGMLQuantizationType.Q8_0)
    for machine, expected in ((NEW, "bfloat16"), (OLD, "float16")):
        found = config(str(file), machine)
        assert (found.dtype, found.kv_dtype, found.weight_format, found.head_format) == (
            expected,
            expected,
            "int8",
            "int8",
        )
        streamed = config(str(file), machine, device="cuda:2GiB")
        assert (streamed.dtype, streamed.weight_format) == (expected, expected)
        asked = config(str(file), machine, dtype="float16")
        assert (asked.dtype, asked.weight_format) == ("float16", "float16")


def test_float16_is_for_gpus(stored):
    _, model = stored
    assert config(model, NEW, dtype="float16").dtype == "float16"
    for settings, machine, why in (
        ({"device": "cpu"}, NEW, "no GPU is asked for"),
        ({}, CPU, "torch finds no CUDA device here"),
        ({"num_ranks": 2}, NEW, "2 ranks .* on GPUs need one each"),
    ):
        with pytest.raises(ConfigError, match=f"--dtype float16 is for GPUs, but the CPU computes: {why}.*Use float32"):
            config(model, machine, dtype="float16", **settings)


def tokens(chosen):
    engine, found = Engine.load(chosen), []
    sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    engine.submit(Submission("a", list(range(3, 20)), sampling, seed=1))
    while engine.has_work:
        found += [token for output in engine.step() for token in output.token_ids]
    return found


def test_a_model_runs_in_float16(stored):
    """On the CPU in torch, with the keys and values of a GPU."""
    _, model = stored
    chosen = config(model, NEW, dtype="float16", max_num_seqs=2, max_model_len=64)
    assert chosen.kv_dtype == "float16"
    exact = config(model, CPU, dtype="float32", max_num_seqs=2, max_model_len=64)
    assert tokens(dataclasses.replace(chosen, device="cpu")) == tokens(exact)


def planned(model, machine, **settings):
    usage = Usage(workload=Workload(prompt_len=20, gen_len=10, max_prompt_len=30), num_sequences=4)
    return plan_for(PlanRequest(settings=Settings(model=model, **settings), usage=usage, machine=machine)).plan


@pytest.fixture
def shape(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path / "config.json")


@pytest.mark.slow  # plans
def test_plans_choose_by_the_machine_s_types(shape):
    for machine, expected in (("t4", "float16"), ("h100", "bfloat16")):
        plan = planned(shape, machine)
        assert plan.pipeline == "resident"
        found = plan.config
        assert (found.device, found.dtype, found.weight_format, found.kv_dtype) == ("cuda:0", *[expected] * 3)
        assert not any("--quantize" in help_.change for help_ in plan.forecast.helps)


@pytest.mark.slow  # plans
def test_a_pipeline_keeps_keys_and_values_as_the_host_s_kernels_know_them():
    usage = Usage(workload=Workload(prompt_len=20, gen_len=10, max_prompt_len=30), num_sequences=4)
    request = PlanRequest(settings=Settings(model="qwen3-30b-a3b", micro_batch=4), usage=usage, machine="t4")
    found = plan_for(request).plan.config
    assert (found.offload is not None, found.dtype, found.kv_dtype) == (True, "float16", "bfloat16")


@pytest.mark.slow  # plans
@pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
def test_what_a_gpu_does_not_run_is_planned_for_the_host(shape):
    plan = planned(shape, "t4", quantize="q4_k")
    assert (plan.config.device, plan.config.weight_format, plan.config.offload) == ("cpu", "q4_k", None)
    assert dict(plan.reasons)["device"].startswith("cpu: --quantize is for the processor")
    on_host = planned(shape, "t4", device="cpu", quantize="q4_k")
    assert on_host.config == plan.config
    with pytest.raises(ConfigError, match=r"--quantize is for the processor: .*; use --device cpu"):
        planned(shape, "t4", device="cuda", quantize="q4_k")
    with pytest.raises(ConfigError, match="--dtype float16 is for GPUs"):
        planned(shape, "t4", device="cpu", dtype="float16")


@pytest.mark.slow  # plans
def test_quantized_weights_are_not_streamed():
    plan = planned("olmoe-1b-7b", "t4", quantize="int8")
    assert (plan.pipeline, plan.config.device, plan.config.weight_format) == ("resident", "cuda:0", "int8")
    assert dict(plan.reasons)["work space"].endswith("MiB for CUDA graphs")
    assert any("for CUDA graphs" in cell for row in policy_table(plan).rows for cell in row)
    large = planned("mixtral-8x7b", "t4", quantize="int8")
    assert (large.pipeline, large.config.device, large.config.offload) == ("hybrid", "cuda:0", None)
    assert (large.config.weight_format, large.config.hybrid.cpu_weight_format) == ("int8", "int8")
    for settings in ({"device": "cuda"}, {}):
        with pytest.raises(CapacityError, match=r"the model needs .* of device memory, but .* computes all experts"):
            planned("mixtral-8x7b", "t4", quantize="int8", gpu_memory_bytes=2 * GIB, **settings)
    with pytest.raises(CapacityError, match=r"quantized weights are not streamed: use --device cpu"):
        planned("mixtral-8x7b", "t4", quantize="int8", device="cuda:10GiB")


@pytest.mark.slow  # plans
def test_a_gpu_shares_experts_with_the_processor_only_where_that_is_faster(tmp_path):
    weak, usage = tmp_path / "weak.json", Usage(workload=Workload(prompt_len=64, gen_len=64, max_prompt_len=64))
    machine = load_machine("t4")
    device = machine.level("device")
    slow = dataclasses.replace(device, read_bytes_per_s=device.read_bytes_per_s / 100)
    levels = tuple(slow if it is device else it for it in machine.levels)
    weak.write_text(machine_to_json(dataclasses.replace(machine, levels=levels)))
    found = {}
    for name in ("t4", str(weak)):
        asked = Settings(model="mixtral-8x7b", quantize="int8")
        found[name] = plan_for(
            PlanRequest(settings=asked, usage=dataclasses.replace(usage, goal="latency"), machine=name)
        ).plan
    assert [plan.config.device for plan in found.values()] == ["cuda:0", "cpu"]
    figures = [
        list(map(float, re.findall(r"([\d.]+) (?:tokens/s|on the|with cuda)", dict(plan.reasons)["device"])))
        for plan in found.values()
    ]
    for plan, (chosen, other) in zip(found.values(), figures, strict=True):
        alone = plan.forecast.tokens_per_s.value
        assert chosen > other
        assert chosen == pytest.approx(alone, rel=0.01)


@pytest.mark.slow  # plans
def test_a_packed_file_is_planned_in_its_format_where_the_gpu_holds_it(tmp_path):
    small = write_headers(tmp_path / "small", num_layers=24, num_experts=32)
    large = write_headers(tmp_path / "large", num_layers=36, num_experts=128)
    for model, machine, floats in ((small, "t4", "float16"), (small, "h100", "bfloat16"), (large, "h100", "bfloat16")):
        plan = planned(model, machine)
        found = plan.config
        assert (plan.pipeline, found.device, found.dtype, found.weight_format) == (
            "resident",
            "cuda:0",
            floats,
            "mxfp4",
        )
        assert {(it.q_proj, it.up, it.down) for it in found.layer_formats} == {(floats, "mxfp4", "mxfp4")}
        assert f"mxfp4: the file's mxfp4, no value changes; other weights are {floats}" in dict(plan.reasons)["weights"]
    here = dataclasses.replace(NEW, accelerator_free_bytes=79 * GIB)
    assert config(large, here).weight_format == "mxfp4"
    too_small = dataclasses.replace(NEW, accelerator_free_bytes=60 * GIB)  # the weights take 60.8 GiB
    with pytest.raises(CapacityError, match=r"the weights need 60\.8 GiB in mxfp4"):
        config(large, too_small, device="cuda")
    streamed = planned(small, "h100", gpu_memory_bytes=8 * GIB, micro_batch=4).config
    assert (streamed.offload is not None, streamed.weight_format, streamed.layer_formats) == (True, "bfloat16", ())


@pytest.mark.slow  # plans
def test_a_model_that_a_gpu_cannot_even_stream_is_planned_for_the_host(tmp_path):
    tiny, machine = tmp_path / "tiny.json", load_machine("t4")
    device = machine.level("device")
    levels = (dataclasses.replace(it, capacity_bytes=4 * GIB) if it is device else it for it in machine.levels)
    tiny.write_text(machine_to_json(dataclasses.replace(machine, levels=tuple(levels))))
    plan = planned("dbrx", str(tiny))
    assert (plan.config.device, plan.config.offload) == ("cpu", None)
    assert "of device memory (4.0 GiB available)" in dict(plan.reasons)["device"]
    with pytest.raises(CapacityError, match=r"of device memory \(4.0 GiB available\)"):
        planned("dbrx", str(tiny), device="cuda")


@pytest.mark.slow  # plans
def test_a_model_that_no_memory_holds_is_on_the_gpu_in_memory_and_on_disk():
    plan, alone = planned("dbrx", "t4"), planned("dbrx", "t4", device="cpu")
    assert (plan.pipeline, plan.config.device) == ("hybrid", "cuda:0")
    assert plan.forecast.tokens_per_s.value > alone.forecast.tokens_per_s.value
    places = dict(plan.forecast.expert_places)
    assert places["disk"] > 0.5
    assert places["ram"] > 0.15
    held = plan.config.experts.num_slots * plan.config.experts.slab_bytes
    assert 0.8 * load_machine("t4").level("ram").capacity_bytes < held < load_machine("t4").level("ram").capacity_bytes


@pytest.mark.slow  # plans
def test_two_formats_of_weights_are_refused(tmp_path):
    write_tiny_mixtral(tmp_path, intermediate_size=64)
    model = str(tmp_path)
    assert config(model, NEW, quantize="int8").device == "cuda:0"
    asked = {"quantize": "int8", "dtype": "float32"}
    for device in ("auto", "cpu", "cuda"):
        with pytest.raises(ConfigError, match="remove --quantize or --dtype"):
            config(model, NEW, device=device, **asked)
    with pytest.raises(ConfigError, match="remove --quantize or --dtype"):
        planned(model, "h100", **asked)


def test_a_machine_without_its_device_has_nothing_that_serves_it():
    host = load_machine("t4").without_device()
    assert [level.name for level in host.levels] == ["disk", "ram"]
    assert [(link.source, link.target) for link in host.links] == [("disk", "ram")]
    assert host.num_devices == 0


@pytest.mark.parametrize("machine", [NEW, CPU])
def test_weights_are_not_both_quantized_and_kept_in_floats(stored, machine):
    _, model = stored
    with pytest.raises(ConfigError, match="weights cannot be both quantized to int8 and kept in bfloat16"):
        config(model, machine, dtype="bfloat16", quantize="int8")
