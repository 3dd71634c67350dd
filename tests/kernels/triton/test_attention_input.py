"""The steps before attention by Triton, against the torch reference, which another test compares with float64."""

import dataclasses
from typing import Any

import pytest
import torch

from moeflow.kernels.attention.attention import write_kv
from moeflow.kernels.attention.attention_input import attention_input
from moeflow.kernels.attention.attention_metadata import AttentionMetadata
from moeflow.kernels.attention.heads import Heads
from moeflow.kernels.attention.kv_blocks import KVBlocks, kv_block_bytes
from moeflow.kernels.cpu import row_ops
from moeflow.kernels.rotary import RotaryTable, inverse_frequencies, rotary_table
from moeflow.kernels.triton import attention_input as triton_attention_input
from moeflow.kernels.triton import kv_cache
from tests.kernels.attention.test_attention_input import written_out
from tests.kernels.triton.launches import triton_alone
from tests.kernels.triton.tolerance import tolerance

NUM_TOKENS = 3
SLOTS = [5, -1, 2]
WAYS: dict[str, dict[str, Any]] = {
    "qwen3": {"norm": "head"},
    "gpt-oss": {"head_dim": 24},
    "olmoe": {"norm": "all", "clip": 0.9},
    "minimax": {"norm": "all", "rotary_dim": 6},
    "hunyuan": {"norm": "head", "norms_last": True},
    "norms of all, last": {"norm": "all", "norms_last": True, "rotary_dim": 6},
    "llama4": {"is_interleaved": True, "norm": "head", "norms_last": True, "rotary_dim": 10},
    "glm": {"is_interleaved": True, "norm": "head", "rotary_dim": 6, "clip": 0.9},
    "gemma4": {"norm": "head", "normed_values": True},
    "no rotation": {"rotary_dim": 0, "clip": 0.5},
    "queries alone": {"norm": "head", "has_keys": False},
    "keys' norm alone": {"norm": "keys"},
}


def make_heads(
    dtype: torch.dtype, *, norm: str | None = None, head_dim: int = 16, normed_values: bool = False, **ways: Any
) -> Heads:
    """Return three query heads over two KV heads, so that tiles of heads have holes."""
    sizes = {"all": (3 * head_dim, 2 * head_dim), "head": (head_dim,) * 2, "keys": (0, head_dim)}.get(
        norm or "", (0, 0)
    )
    if not ways.get("has_keys", True):
        sizes = (sizes[0], 0)
    q_norm, k_norm = (torch.randn(size).to(dtype) if size else None for size in sizes)
    v_norm = torch.randn(head_dim).to(dtype) if normed_values else None
    return Heads(3, 2, head_dim, q_norm, k_norm, v_norm, eps=1e-6, **ways)


def make_blocks(dtype: str, *, head_dim: int, num_kv_heads: int = 2, latent_dim: int = 0) -> KVBlocks:
    """Return three blocks of four tokens, which hold the same bytes everywhere."""
    sizes = {"num_kv_heads": num_kv_heads, "block_size": 4, "head_dim": head_dim, "latent_dim": latent_dim}
    return KVBlocks(torch.full((3 * kv_block_bytes(dtype, **sizes),), 7, dtype=torch.uint8), dtype, **sizes)


def make_table(dtype: torch.dtype, dim: int) -> RotaryTable | None:
    if not dim:
        return None
    return RotaryTable(
        *rotary_table(torch.tensor([3, 9, 700]), torch.from_numpy(inverse_frequencies(dim, 1e4)), 1.1, dtype)
    )


def by_reference(rows: torch.Tensor, heads: Heads, table: RotaryTable | None, blocks: KVBlocks) -> torch.Tensor:
    """Return all queries by torch, and store the tokens that have a slot."""
    stored = [token for token in range(NUM_TOKENS) if SLOTS[token] >= 0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_ops, "_AVAILABLE", False)
        scratch = make_blocks(blocks.dtype, head_dim=heads.head_dim)
        metadata = AttentionMetadata(torch.arange(NUM_TOKENS), (), blocks.block_size)
        queries = attention_input(rows.clone(), heads, table, scratch, metadata)
        own = None if table is None else RotaryTable(table.cos[stored], table.sin[stored])
        metadata = AttentionMetadata(torch.tensor([SLOTS[token] for token in stored]), (), blocks.block_size)
        attention_input(rows[stored], heads, own, blocks, metadata)
    return queries


def check(dtype: torch.dtype, kv_dtype: str, *, rotary_dim: int | None = None, **ways: Any) -> None:
    torch.manual_seed(0)
    heads = make_heads(dtype, **ways)
    table = make_table(dtype, heads.head_dim if rotary_dim is None else rotary_dim)
    wide = torch.randn(NUM_TOKENS, heads.row_size + 5).to(dtype)
    rows = wide[:, : heads.row_size]
    want_blocks, blocks = (make_blocks(kv_dtype, head_dim=heads.head_dim) for _ in range(2))
    want = by_reference(rows, heads, table, want_blocks)
    with triton_alone(triton_attention_input) as started:
        queries = attention_input(rows, heads, table, blocks, AttentionMetadata(torch.tensor(SLOTS), (), 4))
    assert len(started) == 1
    torch.testing.assert_close(queries, want, **tolerance(dtype))
    found, expected = ([x.float() for x in all_stored(it)] for it in (blocks, want_blocks))
    for got, wanted in zip(found, expected, strict=True):
        steps = {"rtol": 0.0, "atol": 1.0} if kv_dtype == "int8" and got.dim() == 4 else tolerance(dtype)
        torch.testing.assert_close(got, wanted, **steps, equal_nan=True)


def all_stored(blocks: KVBlocks) -> list[torch.Tensor]:
    return [x for x in (blocks.keys, blocks.values, blocks.key_scales, blocks.value_scales) if x is not None]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_step_is_the_reference(dtype: torch.dtype, way: str) -> None:
    check(dtype, str(dtype).removeprefix("torch."), **WAYS[way])


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [(torch.float16, "int8"), (torch.float32, "int8"), (torch.float16, "float32"), (torch.float32, "bfloat16")],
)
@pytest.mark.parametrize("way", ["qwen3", "glm"])
def test_keys_and_values_are_stored_in_any_type(dtype: torch.dtype, kv_dtype: str, way: str) -> None:
    check(dtype, kv_dtype, **WAYS[way])


def test_the_steps_are_as_written_out_in_float64() -> None:
    torch.manual_seed(1)
    heads = make_heads(torch.float32, norm="all", clip=0.8, is_interleaved=True)
    rows, table, blocks = (
        torch.randn(NUM_TOKENS, heads.row_size),
        make_table(torch.float32, 16),
        make_blocks("float32", head_dim=16),
    )
    with triton_alone():
        queries = attention_input(rows, heads, table, blocks, AttentionMetadata(torch.tensor([0, 5, 11]), (), 4))
    where, offsets = torch.tensor([0, 1, 2]), torch.tensor([0, 1, 3])
    stored = (half.transpose(1, 2)[where, offsets] for half in (blocks.keys, blocks.values))
    for got, want in zip((queries, *stored), written_out(rows, heads, table), strict=True):
        torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


def test_a_token_has_the_same_bits_in_any_batch() -> None:
    heads = dataclasses.replace(make_heads(torch.bfloat16, norm="all"), clip=1.0)
    rows, table = torch.randn(NUM_TOKENS, heads.row_size).bfloat16(), make_table(torch.bfloat16, 16)
    assert table is not None
    blocks = make_blocks("int8", head_dim=16)
    with triton_alone():
        whole = attention_input(rows, heads, table, blocks, AttentionMetadata(torch.tensor([4, 5, 6]), (), 4))
        bytes_of_batch = blocks.storage.clone()
        blocks.storage.fill_(7)
        for token in range(NUM_TOKENS):
            one = slice(token, token + 1)
            own = RotaryTable(table.cos[one], table.sin[one])
            metadata = AttentionMetadata(torch.tensor([4 + token]), (), 4)
            assert torch.equal(attention_input(rows[one], heads, own, blocks, metadata), whole[one])
    assert torch.equal(blocks.storage, bytes_of_batch)


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("latent_dim", [0, 12])
def test_keys_and_values_are_stored_as_the_reference_does(kv_dtype: str, latent_dim: int) -> None:
    num_kv_heads = 1 if latent_dim else 3
    want, blocks = (
        make_blocks(kv_dtype, head_dim=18, num_kv_heads=num_kv_heads, latent_dim=latent_dim) for _ in range(2)
    )
    k, v = (torch.randn(4, num_kv_heads, 20)[..., :18] for _ in range(2))
    k[0], k[1, :, :3] = 0.0, 1e-31
    slots = torch.tensor([0, 7, -1, 9])
    kept = slots >= 0
    want.write(slots[kept], k[kept], None if latent_dim else v[kept])
    with triton_alone(kv_cache) as started:
        write_kv(k, None if latent_dim else v, blocks, slots)
    assert len(started) == 1
    assert torch.equal(blocks.storage, want.storage)
