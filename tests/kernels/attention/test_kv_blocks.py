"""Blocks of keys and values: written rows read back from their own place and nowhere else."""

import pytest
import torch
from torch.autograd.profiler import profile

from moeflow.kernels.attention.kv_blocks import KV_DTYPES, kv_block_bytes
from tests.kernels.passes import make_blocks

ERROR = {"float32": 0.0, "bfloat16": 2.0**-8, "int8": 0.5 / 127}  # of the largest value of a row


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize(("block_size", "head_dim"), [(16, 8), (4, 24), (1, 64), (5, 2)])
def test_what_is_written_comes_back(dtype, block_size, head_dim):
    torch.manual_seed(0)
    blocks = make_blocks(6, dtype=dtype, block_size=block_size, num_kv_heads=3, head_dim=head_dim)
    slots = torch.tensor([0, 5 * block_size, 3 * block_size - 1])
    k, v = torch.randn(2, 3, 3, head_dim)
    blocks.write(slots, k, v)
    every = torch.arange(6)
    for stored, want in zip(blocks.read(every, torch.float32), (k, v), strict=True):
        check_stored(stored, slots, want, ERROR[dtype])


def check_stored(stored, slots, want, error):
    """Compare stored [KV, slots, D] with the expected rows, and with zero elsewhere."""
    got = stored.transpose(0, 1)
    assert got[slots].shape == want.shape
    assert ((got[slots] - want).abs() <= error * want.abs().amax(-1, keepdim=True) * 1.001).all()
    others = torch.ones(len(got), dtype=torch.bool)
    others[slots] = False
    assert (got[others] == 0).all()


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize(("block_size", "head_dim", "latent_dim"), [(16, 24, 16), (4, 6, 2), (5, 64, 62)])
def test_values_that_are_a_part_of_keys_are_stored_once(dtype, block_size, head_dim, latent_dim):
    torch.manual_seed(0)
    shape = {"block_size": block_size, "num_kv_heads": 3, "head_dim": head_dim, "latent_dim": latent_dim}
    blocks = make_blocks(6, dtype=dtype, **shape)
    value_bytes = {"float32": 4, "bfloat16": 2, "int8": 1}[dtype]
    scales = 8 if dtype == "int8" else 0
    assert blocks.storage.nbytes == 6 * kv_block_bytes(dtype, **shape)
    assert kv_block_bytes(dtype, **shape) == 3 * block_size * (head_dim * value_bytes + scales)
    slots = torch.tensor([0, 5 * block_size, 3 * block_size - 1])
    k = torch.randn(3, 3, head_dim)
    k[..., latent_dim:] *= 100  # which costs the rest no precision
    blocks.write(slots, k)
    keys, values = blocks.read(torch.arange(6), torch.float32)
    check_stored(values, slots, k[..., :latent_dim], ERROR[dtype])
    check_stored(keys[..., :latent_dim], slots, k[..., :latent_dim], ERROR[dtype])
    check_stored(keys[..., latent_dim:], slots, k[..., latent_dim:], ERROR[dtype])
    assert torch.equal(keys[..., :latent_dim], values)


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_blocks_take_the_bytes_that_are_planned_for_them(dtype):
    assert kv_block_bytes(dtype, num_kv_heads=2, block_size=16, head_dim=8) == 2 * 16 * (
        2 * 8 * getattr(torch, dtype).itemsize + (8 if dtype == "int8" else 0)
    )


def test_int8_of_nothing_is_nothing():
    blocks = make_blocks(1, dtype="int8")
    blocks.write(torch.tensor([1]), torch.zeros(1, 2, 8), torch.full((1, 2, 8), 1e-38))
    assert all((half == 0).all() for half in blocks.read(torch.tensor([0]), torch.float32))


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_reading_two_blocks_touches_no_others(dtype):
    blocks = make_blocks(4096, dtype=dtype)
    with profile(use_kineto=False, profile_memory=True) as profiler:
        blocks.read(torch.tensor([4000, 7]), torch.float32)
    allocated = sum(max(event.self_cpu_memory_usage, 0) for event in profiler.function_events)
    assert 0 < allocated < blocks.storage.nbytes / 100
