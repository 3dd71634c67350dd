"""Checks of attention's kernels: the steps before it, storing K and V, and attention itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moeflow.kernels.attention.attention import attend, write_kv
from moeflow.kernels.attention.attention_input import attention_input
from moeflow.kernels.attention.attention_metadata import AttentionMetadata
from moeflow.kernels.attention.heads import Heads
from moeflow.kernels.attention.kv_blocks import KVBlocks, kv_block_bytes
from moeflow.kernels.attention.latent_attention import attend_to_latents
from moeflow.kernels.attention.latent_heads import LatentHeads
from moeflow.kernels.attention.scores import Scores
from moeflow.kernels.norm import NormWeights
from moeflow.kernels.rotary import RotaryTable
from studies.gpu_check.resident.accuracy import Accuracy, Widen

BLOCK_SIZE = 16
Spans = Sequence[tuple[int, int]]  # start and number of tokens of each sequence


class _Shape(NamedTuple):
    heads: tuple[int, int]
    head_dim: int
    latent_dim: int = 0


def make_blocks(device: torch.device, num_blocks: int, dtype: str, **shape: int) -> KVBlocks:
    """Return blocks of zeros that the CPU extension leaves alone."""
    sizes = {"block_size": BLOCK_SIZE, "latent_dim": 0, **shape}
    num_bytes = num_blocks * kv_block_bytes(dtype, **sizes)
    blocks = KVBlocks(torch.zeros(num_bytes, dtype=torch.uint8, device=device), dtype, **sizes)
    blocks.handle = None
    return blocks


def check_attention(accuracy: Accuracy) -> None:
    """Compare attention in all its ways: windows, sinks, soft caps, trees, int8, latents, prompts and decodes."""
    is_small = accuracy.target.is_rehearsal
    mixed: Spans = [(17, 2), (9, 1)] if is_small else [(0, 300), (130, 77), (2000, 1)]
    decodes: Spans = [(4000, 1), (37, 1), (0, 1), (1023, 1)]
    qwen = _Shape((2, 1), 16) if is_small else _Shape((32, 4), 128)
    gpt_oss = _Shape((4, 2), 8) if is_small else _Shape((64, 8), 64)
    gemma = _Shape((2, 1), 16) if is_small else _Shape((8, 4), 256)
    latent = _Shape((4, 1), 24, 16) if is_small else _Shape((16, 1), 576, 512)
    sinks = torch.randn(gpt_oss.heads[0], device=accuracy.target.device)
    window = 7 if is_small else 128
    own = accuracy.dtype_name
    for spans in [mixed] if is_small else [mixed, decodes]:
        _check(accuracy, "attention", spans, qwen, own)
        _check(accuracy, "attention, window and sinks", spans, gpt_oss, own, Scores(window, sinks=sinks))
        _check(accuracy, "attention, soft cap", spans, gemma, own, Scores(soft_cap=50.0))
        _check(accuracy, "attention, gates", spans, gemma, own, has_gates=True)
        _check(accuracy, "attention, latent", spans, latent, own)
        _check(accuracy, "attention, int8", spans, qwen, "int8")
        _check(accuracy, "attention, latent, int8", spans, latent, "int8")
    _check(accuracy, "attention, tree", mixed, qwen, own, has_trees=True)


def _check(
    accuracy: Accuracy,
    name: str,
    spans: Spans,
    shape: _Shape,
    kv_dtype: str,
    scores: Scores | None = None,
    *,
    has_trees: bool = False,
    has_gates: bool = False,
) -> None:
    """Compare attention over stored K and V; all that no sequence has in its blocks is NaN for the kernel."""
    metadata, blocks = _stored(accuracy, spans, shape, kv_dtype, has_trees)
    q = accuracy.draw(sum(count for _, count in spans), shape.heads[0], shape.head_dim)
    gates = accuracy.draw(len(q), shape.heads[0] * shape.head_dim) if has_gates else None
    clean = blocks.storage.clone()

    def run(widen: Widen) -> Sequence[Tensor]:
        wide = widen(q)
        if wide.dtype is torch.float64:
            blocks.storage.copy_(clean)
        wide_gates = None if gates is None else widen(gates)
        return [attend(wide, blocks, metadata, scores or Scores(), wide_gates).view(len(q), shape.heads[0], -1)]

    _poison_rest(blocks, metadata)
    accuracy.check(name, run)


def _stored(
    accuracy: Accuracy, spans: Spans, shape: _Shape, kv_dtype: str, has_trees: bool
) -> tuple[AttentionMetadata, KVBlocks]:
    """Write random K and V of whole sequences to blocks in random order."""
    device, num_kv_heads = accuracy.target.device, shape.heads[1]
    needs = [-(-(start + count) // BLOCK_SIZE) for start, count in spans]
    order = iter(accuracy.permutation(sum(needs) + 2).tolist())
    block_ids = [[next(order) for _ in range(need)] for need in needs]
    shapes = {"num_kv_heads": num_kv_heads, "head_dim": shape.head_dim, "latent_dim": shape.latent_dim}
    blocks = make_blocks(device, sum(needs) + 2, kv_dtype, **shapes)
    for (start, count), ids in zip(spans, block_ids, strict=True):
        slots = _slots(ids, start + count, device)
        k, v = (accuracy.draw(start + count, num_kv_heads, shape.head_dim) for _ in range(2))
        blocks.write(slots, k, None if shape.latent_dim else v)
    num_tokens = sum(count for _, count in spans)
    masks = torch.randint(-(2**62), 2**62, (num_tokens,), device=device) if has_trees else None
    if masks is not None:  # each token sees itself
        own = [64 - count + token for _, count in spans for token in range(count)]
        masks |= torch.tensor([_bit(place) for place in own], device=device)
    metadata = AttentionMetadata.build(
        starts=[start for start, _ in spans],
        num_tokens=[count for _, count in spans],
        block_ids=block_ids,
        block_size=BLOCK_SIZE,
        device=device,
        tree_masks=masks,
    )
    return metadata, blocks


def _bit(place: int) -> int:
    """Return a mask with one bit, as a signed number; none for the tokens before the last 64."""
    if place < 0:
        return 0
    return 1 << place if place < 63 else -(1 << 63)


def _slots(block_ids: Sequence[int], count: int, device: torch.device) -> Tensor:
    places = [block_ids[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(count)]
    return torch.tensor(places, dtype=torch.int64, device=device)


def _poison_rest(blocks: KVBlocks, metadata: AttentionMetadata) -> None:
    """Make K and V of slots that no sequence has NaN; of int8, their scales."""
    is_free = torch.ones(len(blocks.keys) * BLOCK_SIZE, dtype=torch.bool, device=blocks.keys.device)
    for span in metadata.spans:
        is_free[_slots(span.block_ids, span.stop, is_free.device)] = False
    free = is_free.nonzero().flatten()
    halves = (blocks.keys, blocks.values) if blocks.key_scales is None else (blocks.key_scales, blocks.value_scales)
    for stored in halves:
        assert stored is not None
        stored.transpose(1, 2)[free // BLOCK_SIZE, free % BLOCK_SIZE] = math.nan


def check_attention_inputs(accuracy: Accuracy) -> None:
    """Compare the steps before attention, and the keys and values that they store."""
    is_small = accuracy.target.is_rehearsal
    heads, kv_heads, dim = (3, 2, 16) if is_small else (32, 4, 128)
    q_norm, k_norm, v_norm = (accuracy.draw(dim) for _ in range(3))
    all_q, all_k = accuracy.draw(heads * dim), accuracy.draw(kv_heads * dim)
    ways: tuple[tuple[int, dict[str, Any]], ...] = (
        (dim, {"q_norm": q_norm, "k_norm": k_norm}),
        (dim, {}),
        (dim // 2, {"q_norm": all_q, "k_norm": all_k, "clip": 0.9}),
        (dim, {"q_norm": q_norm, "k_norm": k_norm, "norms_last": True, "is_interleaved": True}),
        (dim, {"q_norm": q_norm, "k_norm": k_norm, "v_norm": v_norm}),
        (0, {"clip": 0.5}),
    )
    for rotary_dim, way in ways:
        for kv_dtype in (accuracy.dtype_name, "int8"):
            _check_input(accuracy, (heads, kv_heads, dim), rotary_dim, way, kv_dtype)
    for kv_dtype in (accuracy.dtype_name, "int8"):
        for latent_dim in (0, dim // 2):
            _check_write(accuracy, dim, latent_dim, kv_dtype)


def _check_input(
    accuracy: Accuracy, sizes: tuple[int, int, int], rotary_dim: int, way: dict[str, Any], kv_dtype: str
) -> None:
    num_heads, num_kv_heads, head_dim = sizes
    num_tokens, device = 2, accuracy.target.device
    rows = accuracy.draw(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim)
    angles = torch.rand(num_tokens, 1, max(rotary_dim, 2) // 2, device=device) * 6
    table = [torch.cat([x, y], dim=-1).to(accuracy.dtype) for x, y in _pairs(angles)]
    slots = accuracy.permutation(3 * BLOCK_SIZE)[:num_tokens]

    def run(widen: Widen) -> Sequence[Tensor]:
        norms: dict[str, Any] = {name: widen(x) if isinstance(x, Tensor) else x for name, x in way.items()}
        heads = Heads(num_heads, num_kv_heads, head_dim, eps=1e-6, **norms)
        rotary = RotaryTable(widen(table[0]), widen(table[1])) if rotary_dim else None
        blocks = make_blocks(device, 3, kv_dtype, num_kv_heads=num_kv_heads, head_dim=head_dim)
        queries = attention_input(widen(rows), heads, rotary, blocks, AttentionMetadata(slots, (), BLOCK_SIZE))
        return [queries, *_all_stored(blocks)]

    name = "attention input, int8" if kv_dtype == "int8" else "attention input"
    accuracy.check(name, run, is_int8=kv_dtype == "int8")


def _pairs(angles: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return both halves of cos, and of sin with the first half negated."""
    return (angles.cos(), angles.cos()), (-angles.sin(), angles.sin())


def _check_write(accuracy: Accuracy, head_dim: int, latent_dim: int, kv_dtype: str) -> None:
    num_kv_heads = 1 if latent_dim else 3
    k, v = (accuracy.draw(2, num_kv_heads, head_dim) for _ in range(2))
    slots = accuracy.permutation(3 * BLOCK_SIZE)[:2]

    def run(widen: Widen) -> Sequence[Tensor]:
        shape = {"num_kv_heads": num_kv_heads, "head_dim": head_dim, "latent_dim": latent_dim}
        blocks = make_blocks(accuracy.target.device, 3, kv_dtype, **shape)
        write_kv(widen(k), None if latent_dim else widen(v), blocks, slots)
        return _all_stored(blocks)

    accuracy.check("write KV", run, is_int8=kv_dtype == "int8")


def _all_stored(blocks: KVBlocks) -> Sequence[Tensor]:
    """Return all keys and values in float64: [KV, tokens, D]."""
    return blocks.read(torch.arange(len(blocks.keys), device=blocks.keys.device), torch.float64)


def check_latent_attention(accuracy: Accuracy) -> None:
    """Compare latent attention from its projections on: the kernel before it, two products, and attention."""
    for is_interleaved in (False, True):
        for kv_dtype in (accuracy.dtype_name, "int8"):
            is_int8 = kv_dtype == "int8"
            name = "latent attention, int8" if is_int8 else "latent attention"
            accuracy.check(name, _latent_run(accuracy, is_interleaved, kv_dtype), is_int8=is_int8)


def _latent_run(accuracy: Accuracy, is_interleaved: bool, kv_dtype: str) -> Callable[[Widen], Sequence[Tensor]]:
    is_small = accuracy.target.is_rehearsal
    num_heads, nope, rope, latent, value = (3, 6, 10, 20, 8) if is_small else (16, 128, 64, 512, 128)
    num_tokens, device = 2, accuracy.target.device
    norm = accuracy.draw(latent)
    q, kept = accuracy.draw(num_tokens, num_heads * (nope + rope)), accuracy.draw(num_tokens, latent + rope)
    up = accuracy.draw(num_heads, nope + value, latent, scale=latent**-0.5)
    angles = torch.rand(num_tokens, 1, rope // 2, device=device) * 6
    table = [torch.cat([x, y], dim=-1).to(accuracy.dtype) for x, y in _pairs(angles)]

    def run(widen: Widen) -> Sequence[Tensor]:
        heads = LatentHeads(
            num_heads=num_heads,
            nope_dim=nope,
            rope_dim=rope,
            latent_dim=latent,
            value_dim=value,
            is_interleaved=is_interleaved,
            latent_norm=NormWeights(widen(norm), 1e-6),
        )
        blocks = make_blocks(device, 2, kv_dtype, num_kv_heads=1, head_dim=latent + rope, latent_dim=latent)
        metadata = AttentionMetadata.build(
            starts=[0], num_tokens=[num_tokens], block_ids=[[1]], block_size=BLOCK_SIZE, device=device
        )
        rotary = RotaryTable(widen(table[0]), widen(table[1]))
        scores = Scores(scale=(nope + rope) ** -0.5)
        return [attend_to_latents(widen(q), widen(kept), widen(up), heads, rotary, blocks, metadata, scores)]

    return run
