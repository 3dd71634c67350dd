"""Windows of keys and values: the copied blocks, and their numbers in the window."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moeflow.core.attention_config import HeadSizes
from moeflow.core.errors import CapacityError
from moeflow.core.offload_config import EmulatedDeviceConfig, EmulatedSpeeds
from moeflow.pipeline.devices.emulated_device import EmulatedDevice
from moeflow.pipeline.devices.offloaded_kv import KVShape, OffloadedKV, window_numbers

HEADS = [HeadSizes(2, 8), HeadSizes(1, 12), HeadSizes(2, 8)]
SHAPE = KVShape(num_blocks=6, block_size=16, heads=HEADS, dtype=torch.float32)


def device(capacity_bytes: int = 2**22) -> EmulatedDevice:
    return EmulatedDevice(EmulatedDeviceConfig(capacity_bytes=capacity_bytes, speeds=EmulatedSpeeds()))


@given(st.lists(st.tuples(st.integers(0, 70), st.integers(1, 40)), min_size=1, max_size=5))
def test_filled_blocks_come_first_and_each_has_a_number_of_its_own(sequences):
    starts = [start for start, _ in sequences]
    sizes = [-(-(start + count) // 16) for start, count in sequences]
    ids = iter(range(100, 1000))
    block_ids = [[next(ids) for _ in range(size)] for size in sizes]
    copied, numbers = window_numbers(starts, block_ids, 16)
    flat = [number for each in numbers for number in each]
    assert sorted(flat) == list(range(sum(sizes)))
    for start, blocks, mine in zip(starts, block_ids, numbers, strict=True):
        for position in range(start):
            assert copied[mine[position // 16]] == blocks[position // 16]
    assert len(copied) == sum(-(-start // 16) for start in starts)


def test_blocks_are_copied_in_order_and_windows_take_turns():
    host = SHAPE.allocate(3)
    for layer in host.layers:
        layer.storage.copy_(torch.randint(0, 200, layer.storage.shape, dtype=torch.uint8))
    kv = OffloadedKV(SHAPE, device(), num_resident=1, window_blocks=4)
    kv.begin_pass(host)
    assert kv.is_resident(0)
    assert not kv.is_resident(1)
    assert kv.gather(1, 0, torch.tensor([4, 2])) == 2 * SHAPE.block_bytes(1)
    kv.gather(2, 1, torch.tensor([5]))
    assert kv.load(1, 0, 2) == 2 * SHAPE.block_bytes(1)
    kv.load(2, 1, 1)
    first, second = kv.window(1, 0), kv.window(2, 1)
    assert first.storage.data_ptr() != second.storage.data_ptr()
    assert [(it.num_kv_heads, it.head_dim) for it in (first, second)] == [(1, 12), (2, 8)]
    expected = host.layer(1).storage.view(6, -1)[[4, 2]].flatten()
    assert torch.equal(first.storage[: len(expected)], expected)
    with pytest.raises(RuntimeError, match="micro-batch 0 of layer 1 without its KV"):
        kv.window(1, 0)


def test_the_blocks_of_a_large_model_are_copied_in_one_parallel_step(monkeypatch):
    """Torch copies rows of more numbers one by one, each with all threads, which takes long on a busy machine."""
    shape = KVShape(num_blocks=2, block_size=16, heads=[HeadSizes(8, 128)], dtype=torch.bfloat16)
    kv = OffloadedKV(shape, device(), num_resident=0, window_blocks=2)
    kv.begin_pass(shape.allocate(1))
    lengths = []
    select = torch.index_select

    def watched(rows, *arguments, **named):
        lengths.append(rows.shape[1])
        return select(rows, *arguments, **named)

    monkeypatch.setattr(torch, "index_select", watched)
    assert kv.gather(0, 0, torch.tensor([1, 0])) == 2 * 65536
    assert lengths == [65536 // 8]
    assert lengths[0] <= 32768


def test_what_stays_and_windows_are_counted():
    needed = 6 * (SHAPE.block_bytes(0) + SHAPE.block_bytes(1)) + 2 * 3 * SHAPE.block_bytes(0)
    OffloadedKV(SHAPE, device(needed), num_resident=2, window_blocks=3)
    with pytest.raises(CapacityError):
        OffloadedKV(SHAPE, device(needed - 1), num_resident=2, window_blocks=3)
