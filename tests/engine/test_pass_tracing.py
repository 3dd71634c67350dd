"""Spans of the passes of real models, switched on and off at run time: they change no token, and cover the passes."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from time import perf_counter_ns

import msgspec
import pytest

from moeflow.core.engine_config import EngineConfig, ExpertSlotsConfig
from moeflow.core.observation import TimelineQuestion
from moeflow.engine import expert_store
from moeflow.engine.engine import Engine
from moeflow.engine.pass_tracing import KEPT_PASSES
from moeflow.experts.disk_reader import DiskReader
from moeflow.kernels.cpu import extension
from moeflow.pipeline.runtime.recording import Recording
from moeflow.planner.choices.packed_files import pack
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings
from tests.engine.streamed_runs import PROMPTS, answers
from tests.tiny_mixtral import write_tiny_mixtral

NUM_LAYERS = 3
needs_extension = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_mixtral(folder, num_local_experts=8, num_hidden_layers=NUM_LAYERS)
    return str(folder)


@pytest.fixture(autouse=True)
def quick_probe(monkeypatch):
    monkeypatch.setattr(expert_store, "probe_read_depth", lambda *_: 2)


def resident(model, **settings) -> EngineConfig:
    return resolve(Settings(model=model, num_threads=1, kv_cache_bytes=2**20, **settings)).config


def from_disk(model, folder, num_slots=5) -> EngineConfig:
    file = folder / "slabs"
    index = pack(model, file, cache_dir=None, quantize=None)
    slots = ExpertSlotsConfig(
        packed_weights_file=str(file), num_slots=num_slots, slab_bytes=index.spec.slab_bytes, policy="lru"
    )
    return dataclasses.replace(resident(model), experts=slots)


@pytest.fixture
def load():
    """Load engines, which are closed in the end."""
    engines = []

    def load(config):
        engines.append(Engine.load(config))
        return engines[-1]

    yield load
    for engine in engines:
        engine.close()


def look(engine, num_passes=KEPT_PASSES) -> Recording:
    return msgspec.msgpack.decode(engine.look(TimelineQuestion(num_passes)).recording, type=Recording)


def spans_of(recording):
    """The spans of each row, by start."""
    rows = recording.to_trace().rows
    return {row.name: sorted(row.spans, key=lambda span: span.start_ns) for row in rows}


def within(spans, outer):
    return [span for span in spans if outer.start_ns <= span.start_ns and span.end_ns <= outer.end_ns]


@needs_extension
def test_the_parts_of_a_resident_model_cover_its_passes_in_order(load, model):
    engine = load(resident(model))
    assert look(engine).num_passes == 0, "the first question begins to record"
    begun_ns = perf_counter_ns()
    answers(engine, PROMPTS[:1], num_tokens=4)
    ended_ns = perf_counter_ns()
    recording = look(engine)
    found = spans_of(recording)
    passes = found["passes"]
    assert [span.label.name for span in passes] == [
        "prompt pass of 5 tokens, 1 request",
        *["decode pass of 1 token, 1 request"] * 3,
    ]
    assert all(span.label.requests == ("0",) for span in passes)
    assert recording.num_passes == 4
    assert begun_ns <= passes[0].start_ns, "kernels and Python read the same clock"
    assert passes[-1].end_ns <= ended_ns
    for one in passes:
        attention, router, experts = (within(found[lane], one) for lane in ("attention", "router", "experts"))
        assert [len(spans) for spans in (attention, router, experts)] == [NUM_LAYERS] * 3
        parts = [span for layer in zip(attention, router, experts, strict=True) for span in layer]
        assert [span.label.layer for span in parts] == [layer for layer in range(NUM_LAYERS) for _ in range(3)]
        parts += within(found["sampling"], one)
        assert [span.label.name for span in parts[-2:]] == ["logits", "sampling"]
        for before, after in pairwise(parts):
            assert before.start_ns < before.end_ns <= after.start_ns
        flops = {span.label.flops for span in experts}
        num_tokens = 5 if one is passes[0] else 1
        assert flops == {2 * num_tokens * 2 * 3 * 32 * 48}, "two experts of three matrices each"
    for lane in ("attention", "router", "experts", "sampling"):
        assert len(found[lane]) == sum(len(within(found[lane], one)) for one in passes), "none lies outside"


@needs_extension
@pytest.mark.parametrize("is_streamed", [False, True])
def test_recording_changes_no_token_and_no_path(load, model, tmp_path, monkeypatch, is_streamed):
    """Kernels fetch experts in their calls, also while these are recorded."""
    lent, begin = [], DiskReader.begin
    monkeypatch.setattr(
        DiskReader, "begin", lambda disk, *args, **more: (lent.append(disk), begin(disk, *args, **more))[1]
    )
    config = from_disk(model, tmp_path) if is_streamed else resident(model)
    plain, traced = load(config), load(config)
    look(traced)
    assert answers(traced) == answers(plain)
    assert look(traced).num_passes > 10
    disks = [engine._runner.experts._disk for engine in (plain, traced)] if is_streamed else []
    assert set(lent) == set(disks)


@needs_extension
def test_experts_from_disk_show_reads_and_waits(load, model, tmp_path):
    engine = load(from_disk(model, tmp_path))
    look(engine)
    answers(engine, PROMPTS[:1], num_tokens=20)
    found = spans_of(look(engine))
    reads = [span for name, spans in found.items() if name.startswith("disk") for span in spans]
    waits = [span for span in found["experts"] if span.is_blocked]
    computed = [span for span in found["experts"] if not span.is_blocked]
    assert sum(span.label.num_bytes for span in reads) >= engine.stats().expert_demand_bytes_total > 0
    assert {span.label.layer for span in reads} == set(range(NUM_LAYERS))
    assert {span.label.name for span in waits} == {"waits for experts"}
    for one in found["passes"]:
        assert len(within(found["attention"], one)) == len(within(found["router"], one)) == NUM_LAYERS
        assert {span.label.layer for span in within(computed, one)} == set(range(NUM_LAYERS))
    kernels = [span for span in computed if span.label.flops]
    assert any(within(waits, span) for span in kernels), "kernels wait within the time of the layer's experts"
    for wait in waits:
        inside = [span for span in kernels if span.start_ns <= wait.start_ns < span.end_ns]
        assert all(span.end_ns >= wait.end_ns and span.label.layer == wait.label.layer for span in inside)


@needs_extension
def test_the_end_of_looking_ends_the_recording(load, model, tmp_path):
    engine = load(from_disk(model, tmp_path))
    look(engine)
    answers(engine, PROMPTS[:1])
    reads = engine._runner.experts._disk.reads
    assert reads.handle.keeps_spans
    engine._end_observing()
    assert not reads.handle.keeps_spans
    assert engine._runner.model.layer_times is None
    answers(engine, PROMPTS[1:2])
    assert reads.take_spans() == []
    assert all(not row.spans for row in engine._runner._trace.rows)
    assert look(engine).num_passes == 0
    answers(engine, PROMPTS[:1], num_tokens=3)
    assert look(engine).num_passes == 3
    assert look(engine, 2).num_passes == 2


@needs_extension
def test_only_the_last_passes_stay(load, model):
    engine = load(resident(model))
    look(engine)
    answers(engine, PROMPTS[:1], num_tokens=KEPT_PASSES + 30)
    recording = look(engine)
    assert recording.num_passes == KEPT_PASSES
    found = spans_of(recording)
    assert len(found["passes"]) == KEPT_PASSES
    assert len(found["attention"]) == KEPT_PASSES * NUM_LAYERS
    assert len(engine._runner._trace.row("passes").spans) == KEPT_PASSES, "earlier ones are dropped"


def test_layers_that_run_one_by_one_tell_their_times(load, model):
    engine = load(dataclasses.replace(resident(model), cpu_isa="", packed_file=""))
    look(engine)
    answers(engine, PROMPTS[:1], num_tokens=3)
    found = spans_of(look(engine))
    assert [span.label.layer for span in found["attention"]] == 3 * [0, 1, 2]
    assert [span.label.name for span in found["experts"]] == ["output projection and router, experts"] * 9
    for attention, network in zip(found["attention"], found["experts"], strict=True):
        assert attention.start_ns < attention.end_ns == network.start_ns < network.end_ns


@needs_extension
def test_passes_are_named_by_what_they_compute(load, model):
    engine = load(resident(model, max_num_batched_tokens=24, max_num_seqs=8))
    look(engine)
    answers(engine, [[5, 9, 200], list(range(40, 90))], num_tokens=6)
    names = [span.label.name for span in spans_of(look(engine))["passes"]]
    assert names[0] == "prompt pass of 24 tokens, 2 requests"
    assert "prompt and decode pass of 24 tokens, 2 requests" in names
    assert "decode pass of 2 tokens, 2 requests" in names
