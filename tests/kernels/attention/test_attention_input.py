"""The steps before attention, by the extension and in torch, against each step written out in float64."""

import dataclasses

import pytest
import torch

from moeflow.kernels.attention.attention_input import attention_input
from moeflow.kernels.attention.attention_metadata import AttentionMetadata
from moeflow.kernels.attention.heads import MAX_INTERLEAVED, Heads
from moeflow.kernels.attention.kv_blocks import KVBlocks, kv_block_bytes
from moeflow.kernels.cpu import extension, row_ops
from moeflow.kernels.lazy_memory import allocate_lazily
from moeflow.kernels.rotary import RotaryTable, inverse_frequencies, rotary_table

BLOCK_SIZE = 16
# tokens, heads, KV heads, head dimension, norm, clip
SHAPES = [
    (1, 9, 3, 64, None, None),
    (0, 4, 2, 8, "head", None),
    (5, 4, 2, 8, "head", None),
    (7, 4, 4, 24, "all", 0.7),
    (3, 1, 1, 40, "all", None),
    (3, 2, 1, 16, None, 0.5),
    (40, 8, 2, 128, "head", None),  # enough for several threads
]


def make_heads(num_heads, num_kv_heads, head_dim, norm, clip):
    sizes = {None: None, "head": (head_dim, head_dim), "all": (num_heads * head_dim, num_kv_heads * head_dim)}[norm]
    norms = (None, None) if sizes is None else tuple(torch.randn(size) for size in sizes)
    return Heads(num_heads, num_kv_heads, head_dim, *norms, eps=1e-6, clip=clip)


def make_pass(num_tokens, heads, dtype=torch.float32, rotary_dim=None):
    """Return the rows of a pass of one sequence, their cos and sin, and an empty cache for them."""
    num_blocks = num_tokens // BLOCK_SIZE + 3
    shape = {"num_kv_heads": heads.num_kv_heads, "block_size": BLOCK_SIZE, "head_dim": heads.head_dim}
    blocks = KVBlocks(allocate_lazily(num_blocks * kv_block_bytes(dtype, **shape)), dtype, **shape)
    metadata = AttentionMetadata.build(
        starts=[11] if num_tokens else [],
        num_tokens=[num_tokens] if num_tokens else [],
        block_ids=[torch.randperm(num_blocks).tolist()] if num_tokens else [],
        block_size=BLOCK_SIZE,
        device="cpu",
    )
    frequencies = inverse_frequencies(rotary_dim or heads.head_dim, 10000.0)
    table = RotaryTable(*rotary_table(torch.arange(11, 11 + num_tokens), frequencies, 1.0, torch.float32))
    rows = torch.randn(num_tokens, (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim)
    return rows, None if rotary_dim == 0 else table, blocks, metadata


def written_out(rows, heads, table):
    """Return queries, keys and values [T, heads, D] in float64."""
    dim = heads.head_dim
    q, k, v = rows.double().split([heads.num_heads * dim, heads.num_kv_heads * dim, heads.num_kv_heads * dim], -1)
    prepared = []

    def normalised(x, norm):
        if norm is None:
            return x
        parts = x.unflatten(-1, (x.shape[-1] // norm.numel(), norm.numel()))
        return (parts / (parts.square().mean(-1, keepdim=True) + heads.eps).sqrt() * norm).flatten(1)

    for x, norm in ((q, heads.q_norm), (k, heads.k_norm)):
        if not heads.norms_last:
            x = normalised(x, norm)
        if heads.clip is not None:
            x = x.clamp(-heads.clip, heads.clip)
        x = x.unflatten(-1, (x.shape[-1] // dim, dim))
        if table is not None:
            half_cos, half_sin = (part[..., table.dim // 2 :].double() for part in (table.cos, table.sin))
            first, second, rest = x.split([table.dim // 2, table.dim // 2, dim - table.dim], -1)
            if heads.is_interleaved:
                first, second = x[..., 0 : table.dim : 2], x[..., 1 : table.dim : 2]
            x = torch.cat((first * half_cos - second * half_sin, second * half_cos + first * half_sin, rest), -1)
        if heads.norms_last:
            x = normalised(x.flatten(1), norm).view(x.shape)
        prepared.append(x)
    v = v if heads.clip is None else v.clamp(-heads.clip, heads.clip)
    return *prepared, v.unflatten(-1, (heads.num_kv_heads, dim))


def stored(blocks, metadata):
    """Return the keys and values of the pass's tokens, [T, KV, D]."""
    where, offsets = metadata.slots // BLOCK_SIZE, metadata.slots % BLOCK_SIZE
    return (half.transpose(1, 2)[where, offsets] for half in (blocks.keys, blocks.values))


def check(num_tokens, heads, rotary_dim=None):
    rows, table, blocks, metadata = make_pass(num_tokens, heads, rotary_dim=rotary_dim)
    q = attention_input(rows.clone(), heads, table, blocks, metadata)
    for got, want in zip((q, *stored(blocks, metadata)), written_out(rows, heads, table), strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("way", [{"norms_last": True}, {"is_interleaved": True}])
@pytest.mark.parametrize("rotary_dim", [None, 6])
def test_norms_after_the_rotation_and_rotated_neighbours(isa, way, rotary_dim, monkeypatch):
    heads = dataclasses.replace(make_heads(4, 2, 16, "head", 0.7), **way)
    check(5, heads, rotary_dim)
    monkeypatch.setattr(row_ops, "_AVAILABLE", False)
    check(5, heads, rotary_dim)


@pytest.mark.parametrize(("num_tokens", "num_heads", "num_kv_heads", "head_dim", "norm", "clip"), SHAPES)
def test_every_step_by_the_extension(isa, num_tokens, num_heads, num_kv_heads, head_dim, norm, clip):
    check(num_tokens, make_heads(num_heads, num_kv_heads, head_dim, norm, clip))


@pytest.mark.parametrize(("num_tokens", "num_heads", "num_kv_heads", "head_dim", "norm", "clip"), SHAPES)
def test_every_step_in_torch(monkeypatch, num_tokens, num_heads, num_kv_heads, head_dim, norm, clip):
    monkeypatch.setattr(row_ops, "_AVAILABLE", False)
    check(num_tokens, make_heads(num_heads, num_kv_heads, head_dim, norm, clip))


@pytest.mark.parametrize("rotary_dim", [0, 2, 24, 40])
@pytest.mark.parametrize("norm", [None, "head", "all"])
@pytest.mark.parametrize("by_extension", [True, False])
def test_a_part_of_a_head_may_be_rotated(isa, monkeypatch, rotary_dim, norm, by_extension):
    if not by_extension:
        monkeypatch.setattr(row_ops, "_AVAILABLE", False)
    check(7, make_heads(4, 2, 40, norm, None), rotary_dim)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("norm", ["head", "all"])
def test_a_token_has_the_same_bits_in_any_batch(isa, dtype, norm):
    heads = make_heads(8, 2, 128, norm, clip=2.0)
    rows, table, blocks, metadata = make_pass(70, heads, dtype)
    q = attention_input(rows.clone(), heads, table, blocks, metadata)
    whole = blocks.storage.clone()
    blocks.storage.zero_()
    extension.set_num_threads(1)
    for first in range(70):
        one = slice(first, first + 1)
        part = AttentionMetadata(metadata.slots[one], (), BLOCK_SIZE)
        own = RotaryTable(table.cos[one], table.sin[one])
        alone = attention_input(rows[one].clone(), heads, own, blocks, part)
        assert torch.equal(alone, q[one])
    extension.set_num_threads(2)
    assert torch.equal(blocks.storage, whole)


def test_rows_and_tables_of_other_sizes_are_refused(needs_kernels):
    heads = make_heads(4, 2, 16, None, None)
    rows, table, blocks, metadata = make_pass(3, heads)
    cos, sin = table.cos, table.sin
    with pytest.raises(ValueError, match="rows of 127 values"):
        attention_input(rows[:, 1:].contiguous(), heads, table, blocks, metadata)
    others = [(cos[1:], sin), (cos, sin[1:]), (cos.double(), sin), (torch.ones(3, 1, 18), torch.ones(3, 1, 18))]
    for other in others:
        with pytest.raises(ValueError, match=r"\[3, 1, 16\] is needed|18 dimensions cannot be rotated in heads of 16"):
            attention_input(rows, heads, RotaryTable(*other), blocks, metadata)


def test_neighbours_in_heads_too_long_for_the_extension_are_refused(needs_kernels):
    assert pytest.importorskip("moeflow.kernels._cpu").MAX_INTERLEAVED == MAX_INTERLEAVED
    heads = dataclasses.replace(make_heads(1, 1, MAX_INTERLEAVED, None, None), is_interleaved=True)
    row_ops.check_interleaved(heads)
    heads = dataclasses.replace(heads, head_dim=MAX_INTERLEAVED + 2)
    rows, *others = make_pass(1, heads)
    with pytest.raises(ValueError, match="at most 2048 values, not 2050"):
        attention_input(rows, heads, *others)
