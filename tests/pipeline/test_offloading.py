"""What every pipeline that streams weights promises, whatever its order; algorithm 1 against its text."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeflow.pipeline.catalog import PIPELINES
from moeflow.pipeline.task import COMPUTE, checked
from moeflow.pipeline.zero_inference import zero_inference

NAMES = sorted(PIPELINES)
SIZES = st.tuples(st.integers(1, 4), st.integers(1, 4), st.booleans(), st.booleans())
LANES = {
    "pre_attention": COMPUTE,
    "post_attention": COMPUTE,
    "device_attention": COMPUTE,
    "cpu_attention": "host",
    "load_hidden": "host_to_device",
    "load_kv": "host_to_device",
    "kv_to_pinned": "host_to_pinned",
    "save_kv": "host",
    "weights_to_device": "host_to_device",
    "offload_qkv": "device_to_host",
    "store_kv": "device_to_host",
    "weights_to_pinned": "host_to_pinned",
}


FOR_WINDOWS = ["kv_to_pinned", "load_kv", "store_kv", "save_kv"]


class Stream:
    """The tasks of a pipeline, and their order."""

    def __init__(self, name, num_layers, num_micro_batches, is_warm, wraps):
        make = PIPELINES[name].make_tasks
        self.tasks = list(checked(make(num_layers, num_micro_batches, is_warm=is_warm, wraps=wraps)))
        self.before = []  # for each task the ids of all that have to be done first, as bits
        for task in self.tasks:
            bits = 0
            for earlier in task.after:
                bits |= self.before[earlier] | 1 << earlier
            self.before.append(bits)
        self.by_op = {}
        for task in self.tasks:
            self.by_op.setdefault(task.op, []).append(task)

    def is_before(self, first, second):
        return bool(self.before[second.id] >> first.id & 1)

    def places(self, op):
        return [(task.layer, task.micro_batch) for task in self.by_op.get(op, [])]

    def at(self, op, layer, micro_batch):
        (task,) = [t for t in self.by_op[op] if (t.layer, t.micro_batch) == (layer, micro_batch)]
        return task


@settings(max_examples=25)
@given(SIZES)
def test_every_pipeline_does_the_same_work(sizes):
    num_layers, num_micro_batches, is_warm, wraps = sizes
    places = [(layer, one) for layer in range(num_layers) for one in range(num_micro_batches)]
    loads = [*range(is_warm, num_layers), *([0] if wraps else [])]
    for name in NAMES:
        stream, pipeline = Stream(name, *sizes), PIPELINES[name]
        assert all(LANES[task.op] == task.lane for task in stream.tasks)
        attention = "cpu_attention" if pipeline.attends_on_host else "device_attention"
        for op in ("pre_attention", attention, "post_attention"):
            assert sorted(stream.places(op)) == places
        pages = list(range(num_micro_batches)) if pipeline.is_paged else [None]
        for op in ("weights_to_pinned", "weights_to_device"):
            assert Counter(stream.places(op)) == Counter((layer, page) for layer in loads for page in pages)
        moved = ["offload_qkv", "load_hidden"] if pipeline.attends_on_host else FOR_WINDOWS
        expected = {attention, "pre_attention", "post_attention"} | (set(moved) if pipeline.has_kv_on_host else set())
        assert set(stream.by_op) - {"weights_to_pinned", "weights_to_device"} == expected


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25)
@given(SIZES)
def test_each_stage_comes_after_what_it_needs(name, sizes):
    stream = Stream(name, *sizes)
    num_layers, num_micro_batches, is_warm, _ = sizes
    chain = ["pre_attention", "offload_qkv", "cpu_attention", "load_hidden", "post_attention"]
    chain = chain if PIPELINES[name].attends_on_host else ["pre_attention", "device_attention", "post_attention"]
    for layer in range(num_layers):
        # With `wraps`, layer 0 is loaded twice; the first time is what this pass needs.
        pages = [] if is_warm and layer == 0 else [t for t in stream.by_op["weights_to_device"] if t.layer == layer]
        pages = pages[: num_micro_batches if PIPELINES[name].is_paged else 1]
        for micro_batch in range(num_micro_batches):
            tasks = [stream.at(op, layer, micro_batch) for op in chain]
            assert all(stream.is_before(*pair) for pair in itertools.pairwise(tasks))
            assert all(stream.is_before(page, tasks[-1]) for page in pages)
            assert not pages or stream.is_before(pages[0], tasks[0])
            if layer:
                assert stream.is_before(stream.at("post_attention", layer - 1, micro_batch), tasks[0])
            if "load_kv" in stream.by_op:
                assert stream.is_before(stream.at("load_kv", layer, micro_batch), tasks[1])


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25)
@given(SIZES)
def test_two_layers_fit_on_the_device_and_two_pages_are_pinned(name, sizes):
    num_layers, num_micro_batches, is_warm, _ = sizes
    stream = Stream(name, *sizes)
    pages_a_layer = num_micro_batches if PIPELINES[name].is_paged else 1
    moves, pins = stream.by_op.get("weights_to_device", []), stream.by_op.get("weights_to_pinned", [])
    for number, (move, pin) in enumerate(zip(moves, pins, strict=True)):
        assert (move.layer, move.micro_batch) == (pin.layer, pin.micro_batch)
        assert stream.is_before(pin, move)
        assert number < 2 or stream.is_before(moves[number - 2], pin)
        layer = number // pages_a_layer + is_warm
        assert layer % num_layers == move.layer
        if layer >= 2:
            over = [stream.at("post_attention", layer - 2, one) for one in range(num_micro_batches)]
            assert all(stream.is_before(one, move) for one in over)


@settings(max_examples=25)
@given(SIZES)
def test_keys_and_values_of_two_micro_batches_fit_on_the_device(sizes):
    stream = Stream("flexgen", *sizes)
    gathered, loads, uses = (stream.by_op[op] for op in ("kv_to_pinned", "load_kv", "device_attention"))
    assert all(stream.is_before(use, load) for use, load in zip(uses, loads[2:], strict=False))
    assert all(stream.is_before(one, load) for one, load in zip(gathered, loads, strict=True))
    assert all(stream.is_before(load, one) for load, one in zip(loads, gathered[2:], strict=False))


def algorithm_1(num_layers, num_micro_batches):
    """Return MoE-Lightning's algorithm as printed; j + 2 wraps, and steps that do not exist are left out."""
    calls = []

    def call(op, i, j):
        i, j = i + (j - 1) // num_micro_batches, (j - 1) % num_micro_batches + 1
        if i <= num_layers:
            calls.append((op, i - 1, j - 1))

    for j in (1, 2):
        call("pre_attention", 1, j)
        call("offload_qkv", 1, j)
        call("cpu_attention", 1, j)
        call("weights_to_pinned", 2, j)
    for i in range(1, num_layers + 1):
        for j in range(1, num_micro_batches + 1):
            call("load_hidden", i, j)
            call("weights_to_device", i + 1, j)
            call("post_attention", i, j)
            call("pre_attention", i, j + 2)
            call("offload_qkv", i, j + 2)
            call("cpu_attention", i, j + 2)
            call("weights_to_pinned", i + 1, j + 2)
    return calls


@settings(max_examples=25)
@given(st.integers(1, 6), st.integers(2, 7))
def test_cgopipe_is_algorithm_1(num_layers, num_micro_batches):
    tasks = PIPELINES["cgopipe"].make_tasks(num_layers, num_micro_batches, is_warm=True)
    assert [(task.op, task.layer, task.micro_batch) for task in tasks] == algorithm_1(num_layers, num_micro_batches)


def test_small_transfers_go_before_pages():
    stream = Stream("cgopipe", 3, 3, True, True)
    assert all((task.priority > 0) == (task.op == "weights_to_device") for task in stream.tasks)
    for hidden in stream.by_op["load_hidden"]:
        page = stream.at("weights_to_device", (hidden.layer + 1) % 3, hidden.micro_batch)
        assert stream.is_before(hidden, page)


@settings(max_examples=25)
@given(SIZES)
def test_a_prefill_also_stores_keys_and_values(sizes):
    num_layers, num_micro_batches, is_warm, wraps = sizes
    plain = zero_inference(num_layers, num_micro_batches, is_warm=is_warm, wraps=wraps)
    full = list(checked(zero_inference(num_layers, num_micro_batches, is_warm=is_warm, wraps=wraps, stores_kv=True)))
    ops = [(task.op, task.layer, task.micro_batch) for task in full if "_kv" not in task.op]
    assert ops == [(task.op, task.layer, task.micro_batch) for task in plain]
    for op, before in (("store_kv", "pre_attention"), ("save_kv", "store_kv")):
        found = [full[task.after[0]].op for task in full if task.op == op]
        assert found == [before] * num_layers * num_micro_batches


@pytest.mark.parametrize("name", NAMES)
def test_a_pass_is_cold_and_the_last_one_unless_said(name):
    make = PIPELINES[name].make_tasks
    assert list(make(3, 2)) == list(make(3, 2, is_warm=False, wraps=False))
