"""A whole model whose experts come from disk: the tokens of the resident one, and what happens when the disk fails."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
from pathlib import Path

import pytest

from moeflow.checkpoint.packed.layout import read_slab_index
from moeflow.core.engine_config import EngineConfig, ExpertSlotsConfig
from moeflow.core.errors import CapacityError
from moeflow.engine import expert_store
from moeflow.engine.engine import Engine
from moeflow.experts.cache.policies import POLICIES
from moeflow.experts.predict.registry import NO_PREDICTOR, PREDICTORS
from moeflow.kernels.cpu import extension
from moeflow.kernels.cpu.packed_experts import expert_bytes
from moeflow.planner.choices.packed_files import pack
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings
from moeflow.workload.routing_trace import read_routing_trace
from tests.checkpoint.packed.slabs import flip_bit
from tests.engine.streamed_runs import PROMPTS, answers, answers_of, run
from tests.tiny_mixtral import write_tiny_mixtral

pytestmark = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_mixtral(folder, num_local_experts=8, num_hidden_layers=3)
    return str(folder)


@pytest.fixture(autouse=True)
def quick_probe(monkeypatch):
    monkeypatch.setattr(expert_store, "probe_read_depth", lambda *_: 2)


def resident_config(model, **settings) -> EngineConfig:
    return resolve(Settings(model=model, num_threads=1, kv_cache_bytes=2**20, **settings)).config


def streamed_config(model, packed_weights_file, num_slots, policy="lru", predictor="none", **settings) -> EngineConfig:
    index = pack(model, packed_weights_file, cache_dir=None, quantize=settings.get("quantize"))
    experts = ExpertSlotsConfig(
        packed_weights_file=str(packed_weights_file),
        num_slots=num_slots,
        slab_bytes=index.spec.slab_bytes,
        policy=policy,
        predictor=predictor,
    )
    return dataclasses.replace(resident_config(model, **settings), experts=experts)


@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("max_num_seqs", [1, 4])
def test_tokens_are_those_of_the_resident_model(model, tmp_path, quantize, max_num_seqs):
    expected = run(resident_config(model, quantize=quantize, max_num_seqs=max_num_seqs))
    predictors = (*PREDICTORS, NO_PREDICTOR)
    for policy, predictor, num_slots in zip(
        sorted(POLICIES), itertools.cycle(predictors), (9, 4, 6, 24, 5), strict=False
    ):
        config = streamed_config(
            model, tmp_path / "slabs", num_slots, policy, predictor, quantize=quantize, max_num_seqs=max_num_seqs
        )
        assert run(config) == expected


def test_a_slab_that_was_damaged_ends_its_requests_and_the_engine_lives(model, tmp_path):
    file = tmp_path / "slabs"
    config = streamed_config(model, file, 4)
    index = read_slab_index(file)
    healthy = run(config)
    for number in range(8):  # all experts of the first layer
        flip_bit(file, index.spec.offset(number) + 17)
    engine = Engine.load(config)
    tokens, errors = answers(engine)
    assert len(errors) == len(PROMPTS)
    assert all("file slabs, layer 0, expert" in error for error in errors.values())
    assert not any(str(file.parent) in error for error in errors.values())
    assert not any(tokens)
    engine._runner._experts.cache.drain()  # of what other reads of that pass have seen
    for number in range(8):  # back
        flip_bit(file, index.spec.offset(number) + 17)
    assert answers(engine) == (healthy, {})
    engine.close()


@pytest.mark.parametrize("num_slots", [3, 20])
def test_a_damaged_slab_concerns_only_those_who_need_it(model, tmp_path, num_slots):
    file = tmp_path / "slabs"
    config = streamed_config(model, file, num_slots, max_num_seqs=4)
    index = read_slab_index(file)
    outcomes = set()
    for number in range(8, 16):  # of the second layer, one after the other
        flip_bit(file, index.spec.offset(number) + 17)
        alone = [answers_of(config, [prompt]) for prompt in PROMPTS]
        tokens, errors = answers_of(config, PROMPTS)
        flip_bit(file, index.spec.offset(number) + 17)
        assert tokens == [tokens for (tokens,), _ in alone]
        assert list(errors.values()) == [error for _, one in alone for error in one.values()]
        outcomes.add(len(errors))
    assert outcomes & {1, 2, 3}


def test_a_file_that_was_cut_while_in_use_ends_its_requests(model, tmp_path):
    file = tmp_path / "slabs"
    engine = Engine.load(streamed_config(model, file, 4))
    os.truncate(file, read_slab_index(file).spec.offset(1))
    _, errors = answers(engine)
    assert len(errors) == len(PROMPTS)
    assert all("it was cut" in error for error in errors.values())
    engine.close()


def test_the_file_is_made_when_it_is_missing(model, tmp_path):
    config = streamed_config(model, tmp_path / "slabs", 4)
    (tmp_path / "slabs").unlink()
    seen = []
    engine = Engine.load(config, lambda *counts: seen.append(counts))
    assert read_slab_index(tmp_path / "slabs").spec.num_slabs == 24
    assert all(0 <= done <= total for done, total in seen)
    engine.close()


def test_the_engine_counts_what_comes_from_disk(model, tmp_path):
    engine = Engine.load(streamed_config(model, tmp_path / "slabs", 15))
    answers(engine)
    stats = engine.stats()
    assert (stats.expert_slots, stats.experts_in_slots, stats.experts_on_disk) == (15, 15, 24)
    assert 0 < stats.expert_hit_rate < 1
    assert stats.expert_demand_bytes_total == stats.expert_misses_total * engine.config.experts.slab_bytes
    assert stats.expert_stall_s_total > 0
    engine.close()


def test_experts_that_were_read_ahead_are_found(model, tmp_path):
    engine = Engine.load(streamed_config(model, tmp_path / "slabs", 12, predictor="next-router"))
    answers(engine, PROMPTS[:1])
    stats = engine.stats()
    assert stats.expert_prefetched_bytes_total > 0
    assert stats.expert_used_bytes_total <= stats.expert_prefetched_bytes_total
    engine.close()


@pytest.mark.parametrize("is_streamed", [True, False])
def test_routing_is_recorded_wherever_experts_are(model, tmp_path, is_streamed):
    settings = {"record_routing": tmp_path / "routing"}
    config = resident_config(model, **settings)
    if is_streamed:
        config = streamed_config(model, tmp_path / "slabs", 5, **settings)
    assert run(config, PROMPTS[:2]) == run(resident_config(model), PROMPTS[:2])
    trace = read_routing_trace(tmp_path / "routing")
    assert (trace.header.num_layers, trace.header.num_experts, trace.header.top_k) == (3, 8, 2)
    assert trace.header.slab_bytes == expert_bytes(32, 48, "float32")
    assert sum(len(routed.ids[0]) for routed in trace.passes) == sum(map(len, PROMPTS[:2])) + 2 * 11
    assert sum(routed.num_generated for routed in trace.passes) == 2 * 12
    assert all(routed.compute_s > 0 for routed in trace.passes)


def test_a_trace_shows_passes_experts_and_reads(model, tmp_path):
    run(streamed_config(model, tmp_path / "slabs", 5, trace_file=tmp_path / "trace.json"), PROMPTS[:1])
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    rows = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert rows == {
        *("passes", "attention", "router", "experts", "sampling"),
        *("disk 0", "disk 1", "disk, waiting pass"),
    }
    slices = [event for event in events if event["ph"] == "X"]
    slab_bytes = expert_bytes(32, 48, "float32")
    computed = [
        event["args"]["bytes"] for event in slices if event["name"] == "experts 2" if event["args"].get("bytes")
    ]
    assert computed
    assert all(num_bytes % slab_bytes == 0 for num_bytes in computed)
    assert all(event["args"]["flops"] > 0 for event in slices if " pass of " in event["name"])
    spans = {event["name"] for event in slices}
    assert {"prompt pass of 5 tokens, 1 request", "decode pass of 1 token, 1 request", "attention 2"} <= spans
    assert {"experts 2", "waits for experts 0", "read 1", "sampling"} <= spans


def test_a_graph_shows_what_ran_in_the_last_pass(model, tmp_path):
    file, trace = tmp_path / "pass.dot", tmp_path / "trace.json"
    run(streamed_config(model, tmp_path / "slabs", 5, graph_file=file, trace_file=trace), PROMPTS[:1])
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    last = max((event for event in events if " pass of " in event["name"]), key=lambda event: event["ts"])
    ran = [
        re.sub(r" (\d+)$", r"\\nlayer \1", event["name"])
        for event in events
        if last["ts"] <= event["ts"] < last["ts"] + last["dur"] and event["cat"] == "work" and event is not last
    ]
    drawn = re.findall(r'^  t\d+ \[label="([^"]*)"', file.read_text(), re.MULTILINE)
    assert sorted(drawn) == sorted(ran)
    assert any(name.startswith("read") for name in drawn)
    run(resident_config(model, graph_file=file), PROMPTS[:1])
    assert (
        len(re.findall(r"^  t\d+ \[label", file.read_text(), re.MULTILINE)) == 3 * 3 + 2
    )  # parts of layers, and the end


def test_a_resident_model_counts_no_experts(model):
    engine = Engine.load(resident_config(model))
    answers(engine, PROMPTS[:1])
    stats = engine.stats()
    assert (stats.expert_slots, stats.experts_on_disk, stats.expert_hit_rate) == (0, 0, 0)


def test_fewer_slots_than_a_pass_needs_are_refused(model, tmp_path):
    with pytest.raises(CapacityError, match=r"1 of the experts fit into memory, but 2 must: raise .*--memory"):
        streamed_config(model, tmp_path / "slabs", 1)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="looks for open files in /proc")
@pytest.mark.parametrize("step", ["probe_read_depth", "DiskReader", "ExpertCache", "PackedExperts"])
def test_a_start_that_fails_leaves_no_file_open_and_no_thread(model, tmp_path, monkeypatch, step):
    config = streamed_config(model, tmp_path / "slabs", 4)

    def fail(*args, **options):
        raise MemoryError

    def opened():
        return sum(link.resolve().name == "slabs" for link in Path("/proc/self/fd").iterdir())

    def num_threads():
        return len(list(Path("/proc/self/task").iterdir()))  # those of the extension, too

    monkeypatch.setattr(expert_store, step, fail)
    before = num_threads()
    with pytest.raises(MemoryError):
        Engine.load(config)
    assert (opened(), num_threads()) == (0, before)
