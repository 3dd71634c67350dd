"""Models larger than an emulated device: every pipeline gives the tokens of the plain run, whatever is cut how."""

from __future__ import annotations

import dataclasses
import itertools
import json
import threading
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import Gemma4TextConfig

from moeflow.core.engine_config import EngineConfig
from moeflow.core.errors import CapacityError, ConfigError
from moeflow.core.observation import TimelineQuestion
from moeflow.core.offload_config import CudaDeviceConfig
from moeflow.engine import forward
from moeflow.engine.engine import Engine
from moeflow.engine.offload.micro_batches import is_decoding
from moeflow.engine.offload.offload_ops import OffloadOps
from moeflow.engine.runner_loading import load_runner
from moeflow.kernels.cpu import extension
from moeflow.models.layers.allocation.weight_formats import WeightFormats
from moeflow.pipeline.catalog import OFFLOADING
from moeflow.pipeline.runtime.recording import Recording
from moeflow.planner.costs.process_memory import PROCESS_BYTES
from moeflow.planner.hardware.host import host_resources
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings, options
from tests.engine.offload.offloaded_runs import DEVICE, FAMILIES, Served, answers, config, offloaded, run, sharing
from tests.models.parity import SEQUENCES, in_mixed_passes, load, random_model
from tests.models.test_gemma4_text import DENSE

pytestmark = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())


@pytest.mark.parametrize("pipeline", OFFLOADING)
def test_tokens_are_those_of_the_plain_run(model, pipeline):
    expected = run(config(model))
    for micro_batch, share in ((1, 0.0), (3, 0.4), (5, 1.0), (1000, 0.0)):
        assert run(offloaded(model, pipeline, micro_batch, share)) == expected


@pytest.mark.parametrize("pipeline", [name for name in OFFLOADING if name != "zero-inference"])
@pytest.mark.parametrize("kv_share", [1 / 3, pytest.param(2 / 3, marks=pytest.mark.thorough), 1.0])
def test_some_layers_keep_their_keys_and_values_on_the_device(model, pipeline, kv_share):
    expected = run(config(model))
    for micro_batch, num_hosted in ((1, 0), (3, 0), (1000, 0), (3, 2)):
        if num_hosted and pipeline != "cgopipe":
            continue
        chosen = offloaded(model, pipeline, micro_batch, resident_kv=kv_share)
        assert chosen.offload.num_resident_kv_layers == round(3 * kv_share)
        assert run(sharing(chosen, num_hosted)) == expected


@pytest.mark.parametrize("pipeline", OFFLOADING)
def test_the_device_attends_to_prompts_and_to_resident_layers(model, monkeypatch, pipeline):
    attended: dict[str, list[tuple[int, bool]]] = {"_device_attention": [], "_cpu_attention": []}
    for name, found in attended.items():
        healthy = getattr(OffloadOps, name)

        def noted(self, layer, micro_batch, healthy=healthy, found=found):
            is_prompt = not all(map(is_decoding, micro_batch.on_host.attention.spans))
            found.append((layer, is_prompt))
            return healthy(self, layer, micro_batch)

        monkeypatch.setattr(OffloadOps, name, noted)
    kv_share = None if pipeline == "zero-inference" else 1 / 3
    run(offloaded(model, pipeline, 3, resident_kv=kv_share))
    on_host = {(layer, False) for layer in (1, 2)} if OFFLOADING[pipeline].attends_on_host else set()
    assert set(attended["_cpu_attention"]) == on_host
    everywhere = {(layer, is_prompt) for layer in range(3) for is_prompt in (True, False)}
    assert set(attended["_device_attention"]) == everywhere - on_host


@pytest.mark.parametrize("pipeline", ["cgopipe", "flexgen", "zero-inference"])
def test_prompts_have_micro_batches_of_their_own_size(model, monkeypatch, pipeline):
    sizes, healthy = set(), OffloadOps.begin_pass

    def noted(self, micro_batches):
        for each in micro_batches:
            spans = each.on_host.attention.spans
            sizes.add((all(map(is_decoding, spans)), len(spans)))
        healthy(self, micro_batches)

    monkeypatch.setattr(OffloadOps, "begin_pass", noted)
    lengths = (20,) * 4
    assert run(offloaded(model, pipeline, 1, prompt_micro_batch=60), lengths) == run(config(model), lengths)
    assert {number for decodes, number in sizes if decodes} == {1}
    assert {number for decodes, number in sizes if not decodes} == {2}  # 80 tokens in two of up to 60


def test_a_device_must_have_room_for_a_micro_batch_of_prompts(model):
    few, many = (offloaded(model, "flexgen", 2, prompt_micro_batch=size) for size in (16, 96))
    assert (few.offload.window_blocks, many.offload.window_blocks) == (14, 14)  # two requests of 7 blocks
    few, many = (offloaded(model, "cgopipe", 2, max_model_len=40, prompt_micro_batch=size) for size in (16, 96))
    assert (few.offload.window_blocks, many.offload.window_blocks) == (3, 6)


@pytest.mark.parametrize("pipeline", ["cgopipe", "flexgen"])
def test_prompts_alone_go_layer_by_layer_and_load_keys_of_earlier_passes_only(model, monkeypatch, pipeline):
    """So no attention waits on the link behind the next layer's weights; a long prompt's later parts load its first."""
    passes, healthy = [], OffloadOps.by_name

    def noted(self):
        ops = dict(healthy(self))
        return {name: lambda task, name=name, op=op: (passes[-1].append(name), op(task))[1] for name, op in ops.items()}

    def begun(self, micro_batches, begin=OffloadOps.begin_pass):
        passes.append([])
        begin(self, micro_batches)

    monkeypatch.setattr(OffloadOps, "by_name", noted)
    monkeypatch.setattr(OffloadOps, "begin_pass", begun)
    chosen = offloaded(model, pipeline, 3, max_num_batched_tokens=48)
    assert run(chosen, (20, 5), 1) == run(config(model), (20, 5), 1)
    whole = passes[0]
    assert not {"load_kv", "kv_to_pinned", "cpu_attention"} & set(whole)
    assert {"device_attention", "store_kv", "save_kv"} <= set(whole)
    passes.clear()
    assert run(chosen, (90,), 1) == run(config(model), (90,), 1)
    first, second = passes
    assert "load_kv" not in first
    assert second.count("load_kv") == 3


@pytest.mark.parametrize("family", FAMILIES)
def test_all_families_run(tmp_path, family):
    random_model(FAMILIES[family]).save_pretrained(tmp_path)
    folder = str(tmp_path)
    expected = run(config(folder, quantize="int8"))
    for pipeline in ("cgopipe", "flexgen", "zero-inference"):
        assert run(offloaded(folder, pipeline, 2, quantize="int8")) == expected


@pytest.mark.parametrize(("num_hosted", "share"), [(0, 0.0), (1, 0.4), (3, 0.2), (5, 0.0), (None, 0.2)])
def test_tokens_are_the_same_however_many_experts_the_host_computes(model, num_hosted, share):
    expected = run(config(model))
    for micro_batch in (1, 3, 1000):
        assert run(sharing(offloaded(model, "cgopipe", micro_batch, share), num_hosted)) == expected


def test_only_a_device_with_a_pace_of_its_own_shares_experts_unasked(model):
    for device, expected in ((DEVICE, 0), (f"{DEVICE},torch", 0), (f"{DEVICE},t4,torch", 0), (f"{DEVICE},t4", None)):
        assert offloaded(model, "cgopipe", 3, device=device).offload.num_hosted_experts == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_all_families_share_experts(tmp_path, family):
    random_model(FAMILIES[family]).save_pretrained(tmp_path)
    folder = str(tmp_path)
    expected = run(config(folder, quantize="int4"))
    assert run(sharing(offloaded(folder, "cgopipe", 2, quantize="int4"), 2)) == expected


def test_the_share_of_the_host_may_change_from_pass_to_pass(model):
    expected = run(config(model))
    engine = Engine.load(sharing(offloaded(model, "cgopipe", 3), 2))
    try:
        share = engine._runner._model._share
        begin, numbers = share.begin_pass, itertools.cycle((2, 0, 3, 3, 1, 5, 0, 0))

        def begin_pass(*work):
            share._fixed = next(numbers)
            begin(*work)

        share.begin_pass = begin_pass
        assert answers(engine) == (expected, [])
    finally:
        engine.close()


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_keys_and_values_of_all_types_move(model, kv_dtype):
    expected = run(config(model, kv_dtype=kv_dtype))
    for pipeline in ("flexgen", "cgopipe"):
        assert run(offloaded(model, pipeline, 3, kv_dtype=kv_dtype)) == expected


def test_preempted_requests_get_the_same_tokens(model):
    lengths = (5, 1, 17, 3, 2)
    expected = run(config(model), lengths, 40)
    engine = Engine.load(offloaded(model, "flexgen", 2, kv_cache_bytes=8 * 6144))  # 8 blocks
    try:
        tokens, errors = answers(engine, lengths, 40)
        assert engine.stats().preemptions_total > 0
    finally:
        engine.close()
    assert (tokens, errors) == (expected, [])


def test_a_pass_that_fails_ends_its_requests_and_the_next_begins_anew(model):
    expected = run(config(model))
    engine = Engine.load(offloaded(model, "cgopipe", 2))
    try:
        assert answers(engine) == (expected, [])
        ops = engine._runner._model._executor.ops
        healthy = ops["pre_attention"]

        def fail_in_layer_1(task):
            if task.layer == 1 and task.micro_batch == 1:
                raise OSError("the device is gone")
            return healthy(task)

        ops["pre_attention"] = fail_in_layer_1
        _, errors = answers(engine)
        assert errors
        assert all("the device is gone" in error for error in errors)
        ops["pre_attention"] = healthy
        assert answers(engine) == (expected, [])
    finally:
        engine.close()


def test_as_many_experts_stay_as_fit(model):
    whole = resolve(Settings(model=model, device="emulated:64MiB,1", max_num_seqs=4)).config.offload
    part = resolve(Settings(model=model, device="emulated:7MiB,1", max_num_seqs=4)).config.offload
    assert whole.num_resident_experts == 5
    assert 0 <= part.num_resident_experts <= 5


def test_a_device_that_is_too_small_is_refused_before_loading(model):
    with pytest.raises(CapacityError, match=r"the device has 100.0 KiB, but .*--max-num-seqs"):
        resolve(Settings(model=model, device="emulated:100KiB,1"))


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"pipeline": "cgopipe"}, "pipeline is for a device that is smaller"),
        ({"micro_batch": 3}, "micro_batch is for a device that is smaller"),
        ({"device": DEVICE, "micro_batch": 0}, "at least 1"),
        ({"device": DEVICE, "pipeline": "fastest"}, "'fastest' is unknown; use one of sequential, cgopipe"),
        ({"device": DEVICE, "resident_experts": 2.0}, "a share, from 0 to 1"),
        ({"device": DEVICE, "resident_kv": -0.5}, "resident_kv is a share, from 0 to 1"),
        ({"resident_kv": 0.5}, "resident_kv is for a device that is smaller"),
        ({"hosted_experts": 0.5}, "hosted_experts is for a device that is smaller"),
        ({"device": DEVICE, "hosted_experts": 1.5}, "hosted_experts is a share, from 0 to 1"),
        (
            {"device": DEVICE, "pipeline": "flexgen", "hosted_experts": 0.5},
            "in flexgen the host computes no experts, .* use --pipeline cgopipe",
        ),
        (
            {"device": DEVICE, "pipeline": "zero-inference", "resident_kv": 0.5},
            "zero-inference keeps all keys and values on the device, .* use --pipeline flexgen",
        ),
        ({"device": DEVICE, "memory_bytes": 2**30}, "--memory does not go with a device that is smaller"),
        ({"device": "emulated:1GiB"}, "does not say how fast its link is"),
        ({"device": DEVICE, "gpu_memory_bytes": 2**30}, "--gpu-memory limits a GPU's memory; an emulated"),
        (
            {"device": DEVICE + ",torch", "packed_weights_file": Path("it.slabs")},
            "--packed-weights is for the processor: .* remove --packed-weights",
        ),
        ({"device": DEVICE + ",torch", "quantize": "int8"}, "--quantize does not go with a GPU that is smaller"),
        ({"device": "cuda:16GB:1"}, 'cuda:16GB:1\' cannot be read: write it as "cuda:MEMORY"'),
        (
            {"device": "cuda:16GiB", "pipeline": "cgopipe"},
            "torch finds no CUDA device here\\. Use .*--device emulated:16GiB,12",
        ),
        (
            {"device": "cuda", "pipeline": "cgopipe"},
            "torch finds no CUDA device here\\. Use .*--device emulated:16GiB,12",
        ),
        ({"device": "cuda"}, "torch finds no CUDA device here\\. Use .*--device emulated:16GiB,12"),
    ],
)
def test_wishes_that_cannot_be_granted_are_explained(model, settings, complaint):
    here = dataclasses.replace(host_resources(), accelerator=None)
    with pytest.raises(ConfigError, match=complaint):
        resolve(Settings(model=model, **settings), resources=here)


def on_gpu(model, *, free=2**34, **settings):
    return plan_on_gpu(model, free=free, **settings).config


def plan_on_gpu(model, *, free=2**34, **settings):
    machine = dataclasses.replace(host_resources(), accelerator="cuda", accelerator_free_bytes=free)
    return resolve(Settings(model=model, **settings), resources=machine).plan


def test_a_gpu_that_is_named_with_its_memory_or_a_pipeline_is_offloaded_to(model):
    for settings in (
        {"device": "cuda:2GiB"},
        {"device": "cuda:0:2GiB", "pipeline": "flexgen"},
        {"device": "cuda", "pipeline": "cgopipe", "gpu_memory_bytes": 2**31},
        {"device": "cuda:2GiB", "gpu_memory_bytes": 2**31},
    ):
        config = on_gpu(model, **settings)
        assert config.offload.cuda == CudaDeviceConfig(
            name="cuda:0", memory_bytes=2**31, capacity_bytes=2**31 - PROCESS_BYTES
        )
        assert (config.device, config.cpu_isa, config.gpu_memory_bytes) == ("cpu", "", 2**31)
        assert any("experimental" in why for _, why in plan_on_gpu(model, **settings).reasons)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=EngineConfig) == config
    assert on_gpu(model, device="cuda:1", micro_batch=3).offload.cuda.memory_bytes == 2**34
    assert on_gpu(model, device="cuda").offload is None


def test_more_of_a_gpu_than_is_free_is_refused(model):
    with pytest.raises(CapacityError, match=r"device memory limit of 2.0 GiB is asked for, but 1.0 GiB are free"):
        on_gpu(model, device="cuda:2GiB", free=2**30)
    with pytest.raises(ConfigError, match=r"--device cuda:2GiB and --gpu-memory 1.0 GiB say different things"):
        on_gpu(model, device="cuda:2GiB", gpu_memory_bytes=2**30)
    with pytest.raises(CapacityError, match=r"the device has 0 B, but"):
        on_gpu(model, device="cuda:1MiB")


def test_the_command_line_offers_all_pipelines():
    assert set(options()["pipeline"].choices) == set(OFFLOADING)


def test_a_trace_shows_every_lane(model, tmp_path):
    run(offloaded(model, "cgopipe", 3, trace_file=tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    ops = {event["name"].split()[0].rstrip(",") for event in events}
    assert {"pre_attention", "offload_qkv", "cpu_attention", "load_hidden", "weights_to_pinned"} <= ops


def test_a_start_that_fails_leaves_no_threads(model, monkeypatch):
    def refuse(**_):
        raise CapacityError("no room for keys and values")

    threads = set(threading.enumerate())
    monkeypatch.setattr(forward, "KVStorage", refuse)
    with pytest.raises(CapacityError, match="no room"):
        Engine.load(offloaded(model, "cgopipe", 8))
    assert set(threading.enumerate()) <= threads


@pytest.mark.parametrize(("pipeline", "num_hosted"), [("cgopipe", 0), ("cgopipe", 3), ("flexgen", 0)])
def test_logits_are_those_of_the_plain_pass_to_the_bit(tmp_path, pipeline, num_hosted):
    """Also where all that is added is normalised before."""
    random_model(FAMILIES["heads that differ, normalised values"]).save_pretrained(tmp_path)
    expected = in_mixed_passes(load(tmp_path, packed=WeightFormats("float32", "float32")), SEQUENCES, block_size=16)
    chosen = sharing(offloaded(str(tmp_path), pipeline, 4, 0.4), num_hosted)
    with closing(load_runner(chosen)) as runner:
        found = in_mixed_passes(Served(runner), SEQUENCES, block_size=16)
    assert all(torch.equal(found[name], expected[name]) for name in SEQUENCES)


@pytest.mark.parametrize(
    ("changes", "has"),
    [
        ({"hidden_size_per_layer_input": 20}, "tokens embedded for each layer"),
        (
            {"num_hidden_layers": 4, "num_kv_shared_layers": 1, "layer_types": ["full_attention"] * 4},
            "layers that attend to others' keys",
        ),
    ],
)
def test_what_layers_need_of_others_is_refused(tmp_path, changes, has):
    random_model(Gemma4TextConfig(**DENSE | {"vocab_size_per_layer_input": 101} | changes)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"--device.* do not go with {has}"):
        offloaded(str(tmp_path), "cgopipe", 2)


def test_a_pipeline_records_its_lanes_while_somebody_looks(model):
    expected = run(config(model))
    with closing(Engine.load(offloaded(model, "cgopipe", 3))) as engine:
        engine.look(TimelineQuestion(64))
        assert answers(engine) == (expected, [])
        recording = msgspec.msgpack.decode(engine.look(TimelineQuestion(64)).recording, type=Recording)
        rows = {row.name: row.spans for row in recording.to_trace().rows if row.spans}
        assert {"passes", "compute", "host", "host_to_device", "device_to_host", "sampling"} <= set(rows)
        passes = rows["passes"]
        for span in rows["compute"]:
            assert any(one.start_ns <= span.start_ns and span.end_ns <= one.end_ns for one in passes)
        assert {span.label.name for span in rows["compute"] if not span.is_blocked} >= {
            "pre_attention",
            "post_attention",
        }
        assert all(span.label.name.startswith("waits for ") for span in rows["compute"] if span.is_blocked)
        engine._end_observing()
        assert all(not row.spans for row in engine._runner._trace.rows)
