import itertools
import mmap
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moeflow.core.attention_config import HeadSizes
from moeflow.core.errors import CapacityError
from moeflow.kv.storage import KVStorage, _runs
from moeflow.models.pass_input import PassInput


def _storage(**changes):
    shape = {"layers": range(3), "num_blocks": 5, "block_size": 4, "num_kv_heads": 2, "head_dim": 8}
    return KVStorage(**(shape | {"dtype": torch.bfloat16, "device": "cpu"} | changes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_layers_are_apart_and_zeroed(dtype):
    storage = _storage(dtype=dtype)
    assert storage.num_bytes == 3 * 5 * 4 * 2 * 2 * (8 * dtype.itemsize + (4 if dtype == torch.int8 else 0))
    storage.layer(1).storage.fill_(1)
    for layer_idx, want in ((0, 0), (1, 1), (2, 0)):
        blocks = storage.layer(layer_idx)
        assert blocks.keys.shape == blocks.values.shape == (5, 2, 4, 8)
        assert (blocks.storage == want).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_layers_may_have_heads_of_their_own(dtype):
    storage = _storage(dtype=dtype, layers=[1, 4, 5], other_heads={4: HeadSizes(1, 24), 9: HeadSizes(7, 2)})
    shapes = [(5, 2, 4, 8), (5, 1, 4, 24), (5, 2, 4, 8)]
    scales = 4 if dtype == torch.int8 else 0
    assert storage.content_bytes * 5 == storage.num_bytes
    assert storage.num_bytes == 5 * 4 * 2 * sum(heads * (dim * dtype.itemsize + scales) for _, heads, _, dim in shapes)
    for value, (layer_idx, shape) in enumerate(zip([1, 4, 5], shapes, strict=True), 1):
        blocks = storage.layer(layer_idx)
        assert blocks.keys.shape == blocks.values.shape == shape
        blocks.keys.fill_(value)
        blocks.values.fill_(-value)
    content = memoryview(bytearray(storage.content_bytes))
    storage.copy_out(3, content)
    kept = [layer.storage.clone() for layer in storage.layers]
    for layer in storage.layers:
        layer.keys[3] = layer.values[3] = 9
    storage.copy_in(3, content)
    assert all(torch.equal(layer.storage, own) for layer, own in zip(storage.layers, kept, strict=True))


@pytest.mark.parametrize(("page_bytes", "num_pages"), [(512, 1), (1024, 2), (256, 2), (65536, 2)])
def test_a_block_is_counted_in_the_pages_of_the_system(monkeypatch, page_bytes, num_pages):
    monkeypatch.setattr(mmap, "PAGESIZE", page_bytes)
    assert _storage(block_size=8).block_bytes == 3 * num_pages * page_bytes
    assert _storage(block_size=9).block_bytes == 3 * (576 // page_bytes + 2) * page_bytes


def _has_huge_pages():
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return setting.exists() and "[never]" not in setting.read_text()


def test_what_does_not_fit_says_how_much_it_needs():
    with pytest.raises(CapacityError, match=r"needs 524288\.0 GiB on cpu"):
        _storage(layers=range(2**20), num_blocks=2**21)


def _many_layers(**changes):
    """Layers of 4 MiB, in blocks of 4 KiB: 64 blocks of a layer are on small pages."""
    return _storage(layers=range(16), num_blocks=1024, block_size=16, head_dim=32, **changes)


@pytest.mark.parametrize("gives_back", [False, True])
def test_a_short_sequence_takes_no_large_page_in_each_layer(gives_back):
    storage = _many_layers(gives_back=gives_back)
    process = psutil.Process()
    before = process.memory_info().rss
    storage.will_write(range(64))
    for layer in storage.layers:
        layer.storage[: 3 * 4096] = 1
    taken = process.memory_info().rss - before
    assert taken < 4 * 2**20
    storage.will_write([5, 1023] if gives_back else [5, 63])
    assert process.memory_info().rss - before < 4 * 2**20


@pytest.mark.skipif(not _has_huge_pages(), reason="this system has no huge pages, or none for us")
@pytest.mark.parametrize("write", [False, True])
def test_a_longer_one_lies_on_large_pages_and_stays_what_it_was(write):
    storage = _many_layers()
    process = psutil.Process()
    before = process.memory_info().rss
    for number, layer in enumerate(storage.layers, 1):
        layer.storage[: 64 * 4096] = number
    if write:
        storage.copy_in(64, memoryview(bytes(storage.content_bytes)))
    else:
        storage.will_write([64])
    for number, layer in enumerate(storage.layers, 1):
        layer.storage[1000 * 4096] = 1
        assert (layer.storage[: 64 * 4096] == number).all()
        assert not layer.storage[64 * 4096 : 1000 * 4096].any()
    assert process.memory_info().rss - before >= 16 * 2 * 2**20 - 2**20


def test_a_pass_tells_which_blocks_it_writes(monkeypatch):
    storage, told = _storage(), []
    monkeypatch.setattr(storage, "will_write", lambda blocks: told.append(sorted(blocks)))
    PassInput([7, 8, 9, 9], [4, 0], [1, 3], [(3, 1), (4,)], [[0]]).tensors(storage, torch.device("cpu"))
    assert told == [[1, 4]]


@pytest.mark.parametrize("head_dim", [64, 72])  # a block of a layer is whole pages, or is not
def test_blocks_that_are_given_back_are_free_and_the_others_stay(head_dim):
    storage = _storage(layers=range(4), num_blocks=600, block_size=16, head_dim=head_dim, gives_back=True)
    process = psutil.Process()
    before = process.memory_info().rss
    for layer in storage.layers:
        layer.keys[:500] = layer.values[:500] = 1
    storage.touch(range(500))
    assert process.memory_info().rss - before <= 500 * storage.block_bytes + 2**20
    storage.give_back([*range(10, 490), 495])
    assert storage.num_touched == 19
    assert storage.untouched([9, 10, 495, 496, 599]) == {10, 495, 599}
    assert process.memory_info().rss - before <= 19 * storage.block_bytes + 2**20
    for layer in storage.layers:
        assert (layer.keys[:10] == 1).all()
        assert (layer.values[490:495] == 1).all()
        assert (layer.values[496:500] == 1).all()
        assert not layer.keys[11:489].any()


@given(st.sets(st.integers(0, 60)))
def test_runs_are_the_same_numbers(blocks):
    runs = _runs(sorted(blocks))
    assert [block for first, end in runs for block in range(first, end)] == sorted(blocks)
    assert all(end < first for (_, end), (first, _) in itertools.pairwise(runs))
