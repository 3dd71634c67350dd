"""CGOPipe with a share of the experts on the host: each stage follows its inputs, and no buffer is used twice."""

from __future__ import annotations

import itertools
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from moeflow.pipeline.cgopipe_sharing import cgopipe_sharing
from moeflow.pipeline.task import COMPUTE, checked

SIZES = st.tuples(st.integers(1, 4), st.integers(1, 4), st.booleans(), st.booleans())
CHAIN = {
    "pre_attention": COMPUTE,
    "offload_qkv": "device_to_host",
    "cpu_attention": "host",
    "load_hidden": "host_to_device",
    "route": COMPUTE,
    "offload_routed": "device_to_host",
    "host_experts": "host",
    "load_sums": "host_to_device",
    "experts": COMPUTE,
}
WEIGHTS = {"weights_to_pinned": "host_to_pinned", "weights_to_device": "host_to_device"}


class Stream:
    """The tasks, and their order."""

    def __init__(self, num_layers, num_micro_batches, is_warm, wraps):
        stream = cgopipe_sharing(num_layers, num_micro_batches, is_warm=is_warm, wraps=wraps)
        self.tasks = list(checked(stream))
        self.before = []  # for each task the ids of all that have to be done first, as bits
        for task in self.tasks:
            bits = 0
            for earlier in task.after:
                bits |= self.before[earlier] | 1 << earlier
            self.before.append(bits)

    def is_before(self, first, second):
        return bool(self.before[second.id] >> first.id & 1)

    def of(self, op):
        return [task for task in self.tasks if task.op == op]

    def at(self, op, layer, micro_batch):
        (task,) = [task for task in self.of(op) if (task.layer, task.micro_batch) == (layer, micro_batch)]
        return task


@settings(max_examples=25)
@given(SIZES)
def test_each_stage_comes_once_and_after_what_it_needs(sizes):
    num_layers, num_micro_batches, is_warm, wraps = sizes
    stream = Stream(*sizes)
    assert all({**CHAIN, **WEIGHTS}[task.op] == task.lane for task in stream.tasks)
    loads = [*range(is_warm, num_layers), *([0] if wraps else [])]
    for op in WEIGHTS:
        expected = Counter((layer, page) for layer in loads for page in range(num_micro_batches))
        assert Counter((task.layer, task.micro_batch) for task in stream.of(op)) == expected
    for layer, micro_batch in itertools.product(range(num_layers), range(num_micro_batches)):
        tasks = [stream.at(op, layer, micro_batch) for op in CHAIN]
        assert all(stream.is_before(*pair) for pair in itertools.pairwise(tasks))
        if layer:
            assert stream.is_before(stream.at("experts", layer - 1, micro_batch), tasks[0])
        pages = [] if is_warm and layer == 0 else [t for t in stream.of("weights_to_device") if t.layer == layer]
        assert all(stream.is_before(page, tasks[-1]) for page in pages[:num_micro_batches])


@settings(max_examples=25)
@given(SIZES)
def test_two_layers_fit_on_the_device_and_two_pages_are_pinned(sizes):
    _, num_micro_batches, is_warm, _ = sizes
    stream = Stream(*sizes)
    moves = stream.of("weights_to_device")
    for number, (move, pin) in enumerate(zip(moves, stream.of("weights_to_pinned"), strict=True)):
        assert stream.is_before(pin, move)
        assert number < 2 or stream.is_before(moves[number - 2], pin)
        layer = number // num_micro_batches + is_warm
        if layer >= 2:
            over = [stream.at("experts", layer - 2, one) for one in range(num_micro_batches)]
            assert all(stream.is_before(one, move) for one in over)


def test_a_layer_is_routed_while_its_weights_arrive():
    stream = Stream(3, 4, True, True)
    last_page = [task for task in stream.of("weights_to_device") if task.layer == 1][-1]
    for micro_batch in range(4):
        assert not stream.is_before(last_page, stream.at("host_experts", 1, micro_batch))
        assert stream.is_before(last_page, stream.at("experts", 1, micro_batch))


def test_a_pass_is_cold_and_the_last_one_unless_said():
    assert list(cgopipe_sharing(3, 2)) == list(cgopipe_sharing(3, 2, is_warm=False, wraps=False))
