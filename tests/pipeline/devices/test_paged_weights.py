"""Pages of weights: whatever their number, the layer arrives whole, and a pipeline that goes wrong is stopped."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moeflow.core.errors import CapacityError
from moeflow.core.offload_config import EmulatedDeviceConfig, EmulatedSpeeds
from moeflow.pipeline.devices.emulated_device import EmulatedDevice
from moeflow.pipeline.devices.paged_weights import PagedWeights


def device(capacity_bytes: int = 2**20) -> EmulatedDevice:
    return EmulatedDevice(EmulatedDeviceConfig(capacity_bytes=capacity_bytes, speeds=EmulatedSpeeds()))


def layers(*sizes: int) -> list[torch.Tensor]:
    return [(torch.arange(size) * 7 + number).to(torch.uint8) for number, size in enumerate(sizes)]


@given(st.lists(st.integers(0, 2000), min_size=3, max_size=5), st.integers(1, 40))
def test_layers_arrive_whole_in_any_number_of_pages(sizes, num_pages):
    parts = layers(*sizes)
    weights = PagedWeights(parts, device())
    weights.begin_pass(num_pages)
    for layer, part in enumerate(parts):
        for page in range(num_pages):
            weights.stage(layer, page)
            weights.load(layer, page)
        assert torch.equal(weights.halves(layer)[weights.half_of(layer)], part)
        if layer:
            previous = weights.halves(layer - 1)[weights.half_of(layer - 1)]
            assert torch.equal(previous, parts[layer - 1])  # the double buffer keeps it until it is given back
            weights.release(layer - 1)


def test_two_layers_are_what_the_device_needs_room_for():
    PagedWeights(layers(1000, 4000, 10), device(8000))
    with pytest.raises(CapacityError, match="two layers' streamed weights"):
        PagedWeights(layers(1000, 4000, 10), device(7999))


def test_bytes_are_counted():
    weights = PagedWeights(layers(1000, 1000), device())
    weights.begin_pass(3)
    assert weights.stage(0) == 1000
    assert weights.load(0) == 1000


def test_a_third_layer_has_to_wait():
    weights = PagedWeights(layers(100, 100, 100), device())
    for layer in (0, 1):
        weights.stage(layer)
        weights.load(layer)
    weights.stage(2)
    with pytest.raises(RuntimeError, match="wants layer 2 in the device, which holds layers 0 and 1"):
        weights.load(2)
    weights.release(0)
    weights.load(2)
    assert weights.half_of(2) != weights.half_of(1)


def test_what_is_not_staged_or_not_there_cannot_be_used():
    weights = PagedWeights(layers(1000, 1000), device())
    weights.begin_pass(2)
    with pytest.raises(RuntimeError, match="takes page 0 of layer 0 before it is in pinned memory"):
        weights.load(0, 0)
    weights.stage(0, 1)
    weights.load(0, 1)
    with pytest.raises(RuntimeError, match="computes with layer 0 before all of it is in the device"):
        weights.half_of(0)


def test_a_page_is_not_overwritten_while_it_is_in_use():
    weights = PagedWeights(layers(1000, 1000), device())
    weights.stage(0)
    with pytest.raises(RuntimeError, match="overwrites page 0 of layer 0 in pinned memory"):
        weights.stage(0)
    weights.load(0)
    weights.stage(0)  # for the next pass
    with pytest.raises(RuntimeError, match="overwrites page 0 of layer 0 in the device"):
        weights.load(0)


def test_a_pass_with_other_pages_keeps_whole_layers_only():
    parts = layers(1000, 1000)
    weights = PagedWeights(parts, device())
    weights.begin_pass(2)
    weights.stage(0)
    weights.load(0)
    weights.stage(1, 0)
    weights.load(1, 0)
    weights.begin_pass(3)
    assert torch.equal(weights.halves(0)[weights.half_of(0)], parts[0])
    weights.stage(1)
    weights.load(1)
    assert torch.equal(weights.halves(1)[weights.half_of(1)], parts[1])
    weights.forget()
    with pytest.raises(RuntimeError):
        weights.half_of(1)


@given(st.lists(st.tuples(st.integers(0, 900), st.integers(0, 900)), min_size=2, max_size=4), st.integers(1, 12))
def test_what_is_skipped_is_not_brought(sizes, num_pages):
    parts = layers(*(skipped + kept for skipped, kept in sizes))
    weights = PagedWeights(parts, device())
    weights.begin_pass(num_pages, [skipped for skipped, _ in sizes])
    for layer, (skipped, kept) in enumerate(sizes):
        assert weights.stage(layer) == weights.load(layer) == kept
        there = weights.halves(layer)[weights.half_of(layer)]
        assert torch.equal(there[skipped:], parts[layer][skipped:])
        weights.release(layer)


def test_a_pass_that_skips_less_begins_anew_and_one_that_skips_more_does_not():
    weights = PagedWeights(layers(1000, 1000), device())

    def begin_pass(skipped):
        is_kept = weights.begin_pass(2, [skipped, skipped])
        if not is_kept:
            weights.stage(0)
            weights.load(0)
        assert weights.half_of(0) in (0, 1)
        return is_kept

    weights.stage(0)
    weights.load(0)
    assert [begin_pass(skipped) for skipped in (0, 200, 200, 100, 300, 0)] == [True, True, True, False, True, False]


def test_halves_take_turns_even_if_both_are_free():
    weights = PagedWeights(layers(100, 100, 100), device())
    halves = []
    for layer in (0, 1, 2, 0):
        weights.stage(layer)
        weights.load(layer)
        halves.append(weights.half_of(layer))
        weights.release(layer)  # though a device may still compute with it
    assert halves == [0, 1, 0, 1]
