"""The benches' reported work against the calls of kernels and disk; by a clock of the test."""

from __future__ import annotations

import dataclasses
import itertools
import os
import statistics

import pytest
import torch

from moeflow.kernels.cpu import attention as cpu_attention
from moeflow.kernels.cpu import extension
from moeflow.kernels.cpu.packed_experts import PackedExperts
from moeflow.kernels.cpu.packed_weight import PackedWeight
from moeflow.planner.costs.cost_model import CostModel
from moeflow.planner.costs.model_costs import Formats, ModelCosts
from moeflow.planner.hardware import disk_rates, kernel_bench
from moeflow.planner.hardware.disk_rates import DiskBench, file_link, overlap_of
from moeflow.planner.hardware.kernel_bench import KernelBench, KernelShape, shapes_of
from tests.planner.examples import SMALL

needs_kernels = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
TOKENS = (1, 5)


@pytest.fixture
def bench(monkeypatch):
    """A bench with little memory, whose calls run once and count as three seconds."""
    monkeypatch.setattr(kernel_bench, "BUFFER_BYTES", 2**20)
    monkeypatch.setattr(kernel_bench, "_times", lambda run, *_: [run(), 3.0][1:])
    return KernelBench(1, dataclasses.replace(kernel_bench.THOROUGH, tokens=TOKENS))


@needs_kernels
def test_a_matrix_that_meets_so_many_rows(bench):
    measured = bench.measure(KernelShape("linear", "float32", (48, 64)))
    for (work, seconds), tokens in zip(measured, TOKENS, strict=True):
        assert (work.num_bytes, work.num_flops) == (48 * 64 * 4, 2 * 48 * 64 * tokens)
        assert (work.kernel, work.dtype, work.rows, work.values) == ("linear", "float32", tokens, 48 * 64)
        assert seconds == 3.0


@needs_kernels
def test_experts_that_tokens_chose(bench, monkeypatch):
    chosen = []
    original = PackedExperts.compute
    monkeypatch.setattr(
        PackedExperts, "compute", lambda self, x, ids, shares: chosen.append(ids) or original(self, x, ids, shares)
    )
    monkeypatch.setattr(kernel_bench, "_times", lambda run, *_: [3.0 for _ in range(8) if run() is not None])
    measured = bench.measure(KernelShape("experts", "bfloat16", (6, 2, 64, 32)))
    turns = list(itertools.batched(chosen, 8)) if hasattr(itertools, "batched") else [chosen[:8], chosen[8:]]
    for (work, _), ids, tokens in zip(measured, turns, TOKENS, strict=True):
        used = statistics.mean(len(set(one.flatten().tolist())) for one in ids)
        values = 3 * 64 * 32
        assert work.num_bytes == pytest.approx(used * values * 2)
        assert work.num_flops == tokens * 2 * 2 * values
        assert work.rows == pytest.approx(tokens * 2 / used)
        assert work.values == values
        assert all(one.shape == (tokens, 2) for one in ids)
        assert all(len(set(row)) == 2 for one in ids for row in one.tolist())


@needs_kernels
def test_attention_decodes_many_sequences_and_a_chunk_of_one_prompt(bench, monkeypatch):
    monkeypatch.setattr(kernel_bench, "CONTEXT", 32)
    (decode, _), (prompt, _) = bench.measure(KernelShape("attention", "float32", (4, 2, 16)))
    kv = 2 * 2 * 16 * 4
    sequences = decode.num_bytes / kv / 32
    assert sequences == min(2**20 // (2 * kv * 32), 64)  # alternating between two layers
    assert decode.num_flops == sequences * 32 * 4 * 16 * 4
    assert (decode.rows, decode.values) == (2.0, 2 * 2 * 16)
    shown = sum(range(1, 33))
    assert (prompt.num_bytes, prompt.num_flops) == (32 * kv, shown * 4 * 16 * 4)
    assert prompt.rows == pytest.approx(2 * max(shown / 32, 1))


@needs_kernels
def test_attention_looks_at_other_keys_and_values_each_time(bench, monkeypatch):
    seen = []
    original = cpu_attention.attend
    monkeypatch.setattr(kernel_bench, "CONTEXT", 32)
    monkeypatch.setattr(kernel_bench, "_times", lambda run, *_: [3.0 for _ in range(4) if run() is not None])
    monkeypatch.setattr(
        cpu_attention, "attend", lambda q, blocks, *rest: seen.append(blocks) or original(q, blocks, *rest)
    )
    bench.measure(KernelShape("attention", "float32", (4, 2, 16)))
    first, second = seen[0].storage, seen[1].storage
    assert abs(first.data_ptr() - second.data_ptr()) >= first.nbytes == second.nbytes


@needs_kernels
def test_rows_take_the_bytes_that_costs_count(bench):
    ((work, seconds),) = bench.measure(KernelShape("rows", "float32", (8, 2, 64)))
    expected = ModelCosts(SMALL, Formats(matrices="int4", embeddings="int8", kv="float32")).row_operations(work.rows)
    assert work == expected
    assert seconds == 3.0


@needs_kernels
def test_sampling_takes_the_rows_of_a_vocabulary(bench):
    measured = bench.measure(KernelShape("sampling", "float32", (1000,)))
    costs = ModelCosts(SMALL, Formats(matrices="int4", embeddings="int8", kv="float32"))
    assert [work for work, _ in measured] == [costs.sampling(tokens) for tokens in TOKENS]
    few = KernelBench(1, dataclasses.replace(kernel_bench.THOROUGH, tokens=(64, 512))).measure(
        KernelShape("sampling", "float32", (10,))
    )
    assert [work.rows for work, _ in few] == [64]  # no pass samples from hundreds of rows


def test_of_a_matrix_too_large_a_part_is_measured():
    effort = dataclasses.replace(kernel_bench.QUICK, most_values=1000)
    shapes = [
        KernelShape("linear", "int8", (50, 20)),
        KernelShape("linear", "int8", (51, 20)),
        KernelShape("linear", "int8", (7, 2000)),
        KernelShape("experts", "int8", (4, 2, 64, 64)),
    ]
    assert kernel_bench.parts_of(shapes, effort) == [shapes[0], KernelShape("linear", "int8", (1, 2000)), shapes[3]]
    assert kernel_bench.parts_of(shapes, kernel_bench.THOROUGH) == shapes


@needs_kernels
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("outputs", [16, 40])
def test_a_matrix_takes_what_the_packed_one_takes(dtype, outputs):
    packed = PackedWeight.pack(torch.zeros(outputs, 64), dtype)
    assert kernel_bench._matrix_bytes(dtype, outputs, 64) == packed.storage.nbytes


@pytest.mark.parametrize("num_bytes", [64, 100, 2**18, 2**20 - 64, 2**20])
def test_parts_of_the_buffer_follow_each_other_and_fill_it(bench, num_bytes):
    parts = bench._parts(num_bytes)
    starts = [part.data_ptr() - bench._buffer.data_ptr() for part in parts]
    stride = -(-num_bytes // 64) * 64
    assert [part.nbytes for part in parts] == [num_bytes] * len(parts)
    assert starts == [number * stride for number in range(len(parts))]
    assert len(parts) == 256 or starts[-1] + num_bytes <= 2**20 < starts[-1] + stride + num_bytes


def test_calls_are_timed_after_one_that_does_not_count(monkeypatch):
    clock = itertools.count()  # a second passes between two looks
    monkeypatch.setattr(kernel_bench.time, "perf_counter", clock.__next__)
    calls = []
    times = kernel_bench._times(lambda: calls.append(1), least=4, during_s=0.0)
    assert times == [1] * 4
    assert len(calls) == 5
    # Each call beyond the least costs three looks: is there time left, begin, end.
    assert len(kernel_bench._times(lambda: None, least=2, during_s=10.0)) == 4


def test_blocks_of_files_are_measured_where_they_fit_into_the_columns():
    formats = Formats(matrices="q4_k", embeddings="q4_k", kv="float32", routers="float32", head="q6_k")
    shapes = shapes_of(ModelCosts(SMALL, formats))
    assert {shape.dtype for shape in shapes if shape.kernel == "experts"} == {"q4_k"}
    narrow = SMALL.with_fields(intermediate_size=480)
    shapes = shapes_of(ModelCosts(narrow, formats))
    assert {shape.dtype for shape in shapes if shape.kernel == "experts"} == {"int4"}
    assert KernelShape("linear", "q6_k", (1000, 512)) in shapes  # the output projection


def test_a_processor_is_measured_in_bfloat16_beside_a_device_that_computes_in_float16():
    half, brief = (
        ModelCosts(SMALL, Formats(matrices=it, embeddings=it, kv=it, activation_bytes=2))
        for it in ("float16", "bfloat16")
    )
    assert shapes_of(half) == shapes_of(brief)


def test_the_shapes_of_a_model():
    costs = ModelCosts(SMALL, Formats(matrices="int4", embeddings="int8", kv="float32"))
    assert shapes_of(costs) == [
        KernelShape("linear", "int4", (64 * 12, 512)),
        KernelShape("linear", "int4", (512, 512)),
        KernelShape("linear", "int8", (1000, 512)),
        KernelShape("attention", "float32", (8, 2, 64)),
        KernelShape("sampling", "float32", (1000,)),
        KernelShape("experts", "int4", (8, 2, 512, 512)),
        KernelShape("linear", "int4", (8, 512)),
    ]
    values = [shape.values for shape in shapes_of(costs)]
    work = [
        costs.pre_attention(1),
        costs.output_projection(1),
        costs.head(1),
        costs.decode_attention(1, 1),
        costs.sampling(1),
    ]
    assert values == [it.values for it in (*work, costs.experts(1), costs.router(1))]  # as efficiencies are looked up


def test_dense_layers_are_measured_as_one_expert_that_all_tokens_use():
    mixed = SMALL.with_fields(dense_layers=(1,), dense_intermediate_size=96)
    costs = ModelCosts(mixed, Formats(matrices="int4", embeddings="int8", kv="float32"))
    (shape,) = set(shapes_of(costs)) - set(shapes_of(dataclasses.replace(costs, shape=SMALL)))
    assert shape == KernelShape("experts", "int4", (1, 1, 512, 96))
    assert shape.values == costs.dense(1).values


class Disk:
    """A file's reads, by a clock that each of them moves on: a quarter of a second."""

    def __init__(self, monkeypatch, tmp_path, num_bytes):
        self.now, self.reads = 0.0, []
        self.file = tmp_path / "file"
        self.file.write_bytes(bytes(num_bytes))
        monkeypatch.setattr(disk_rates.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(disk_rates.os, "preadv", self.preadv)
        monkeypatch.setattr(disk_rates, "DEPTHS", (1,))
        monkeypatch.setattr(disk_rates, "SIZES", (4096, 8192))

    def preadv(self, descriptor, buffers, offset):
        self.now += 0.25
        self.reads.append((offset, len(buffers[0])))
        return len(buffers[0])


def test_a_disks_rate_is_what_was_read_over_the_time_it_took(monkeypatch, tmp_path):
    disk = Disk(monkeypatch, tmp_path, 64 * 1024)
    monkeypatch.setattr(disk_rates, "MIN_S", 0.9)
    descriptor = os.open(disk.file, os.O_RDONLY)
    bench = DiskBench(descriptor, 64 * 1024)
    bench.sample()
    os.close(descriptor)
    rates = {rate.transfer_bytes: rate.bytes_per_s for rate in bench.link().rates}
    assert rates == {4096: 4096 * 4, 8192: 8192 * 4}
    for size in (4096, 8192):
        places = [offset for offset, length in disk.reads if length == size]
        assert len(places) == len(set(places)) == 4  # until 0.9 s are over, and none twice
        assert all(offset % size == 0 and offset + size <= 64 * 1024 for offset in places)
    link = bench.link()
    assert (link.source, link.target) == ("disk", "ram")


def test_readers_share_the_places_of_a_file(monkeypatch, tmp_path):
    disk = Disk(monkeypatch, tmp_path, 64 * 1024)
    monkeypatch.setattr(disk_rates, "MIN_S", 1e9)
    bench = DiskBench(0, 64 * 1024)
    bench._rate(4096, 3)
    assert sorted(disk.reads) == [(place * 4096, 4096) for place in range(16)]


def test_a_file_that_is_there_is_sampled_if_it_is_large_enough(monkeypatch, tmp_path):
    disk = Disk(monkeypatch, tmp_path, 4 * 8192)
    link = file_link(disk.file)
    assert {rate.bytes_per_s for rate in link.rates} == {4096 * 4, 8192 * 4}
    disk.file.write_bytes(bytes(4 * 8192 - 1))
    assert file_link(disk.file) is None


@pytest.mark.parametrize(
    ("computing", "reading", "overlap"),
    [
        (1.0, 1.0, 1.0),
        (0.5, 0.5, 0.0),
        (0.8, 0.2, 0.0),
        (0.75, 0.75, 2 / 3),
        (0.2, 0.3, 0.0),  # slower than one after the other
        (1.2, 1.1, 1.0),  # the machine became faster
        (0.0, 0.0, 0.0),
    ],
)
def test_two_things_that_take_as_long_take_so_long_together(computing, reading, overlap):
    assert overlap_of(computing, reading) == pytest.approx(overlap)
    if computing == reading and 0.5 <= computing <= 1.0:
        assert CostModel.combine({"a": 1.0, "b": 1.0}, overlap) == pytest.approx(1 / computing)


def test_reading_beside_computing_is_set_against_each_alone(monkeypatch, tmp_path):
    """A call computes for half a second alone and for a whole one beside reads, which then take twice as long too."""
    bench = DiskBench(0, 1)
    monkeypatch.setattr(bench, "_rate", lambda *_: next(rates))
    monkeypatch.setattr(disk_rates, "_calls_per_s", lambda *_: next(calls))
    rates, calls = iter([4e9, 2e9]), iter([2.0, 1.0])
    assert bench.overlap == 0.0
    bench.sample_overlap(lambda: None)
    assert bench.overlap == pytest.approx(0.0)
    rates, calls = iter([4e9, 4e9]), iter([2.0, 1.0])
    bench.sample_overlap(lambda: None)
    rates, calls = iter([4e9, 4e9]), iter([2.0, 2.0])
    bench.sample_overlap(lambda: None)
    assert bench.overlap == pytest.approx(2 - 2 / 1.5)


def test_calls_are_counted_until_the_reads_are_over(monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(disk_rates.time, "perf_counter", lambda: next(clock) / 10)
    monkeypatch.setattr(disk_rates, "MIN_S", 1e9)
    left = iter([False, False, True])
    calls = []
    disk_rates._calls_per_s(lambda: calls.append(1), lambda: next(left))
    assert len(calls) == 1 + 3  # the first does not count, and one is made in any case


def test_the_median_of_samples_counts():
    bench = DiskBench(0, 1)
    for number, rate in enumerate((5.0, 1.0, 3.0)):
        for found in bench._samples.values():
            found.append(rate + number * 0)
    assert {rate.bytes_per_s for rate in bench.link().rates} == {3.0}


def test_memory_to_read_into_begins_on_a_page():
    view = disk_rates._page_aligned(10_000)
    assert len(view) == 10_000
    assert torch.frombuffer(view, dtype=torch.uint8).data_ptr() % 4096 == 0
