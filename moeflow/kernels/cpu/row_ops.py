"""Operations of the CPU extension on rows of float32, each row by itself: the same bits alone and in any batch.

Few rows are computed by the calling thread alone, because waking another takes longer. Callers have checked every x by
`accepts`: these calls take a microsecond, and a second check would add a third.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from moeflow.kernels.arrays import Array, address, floats_like, ids_like, is_contiguous, is_float32, is_in_main_memory
from moeflow.kernels.attention.heads import MAX_INTERLEAVED, Heads
from moeflow.kernels.attention.kv_blocks import KVBlocks
from moeflow.kernels.cpu import extension
from moeflow.kernels.cpu.arguments import floats
from moeflow.kernels.rotary import RotaryTable

if extension.is_available():
    import moeflow.kernels._cpu as _cpu

_AVAILABLE = extension.is_available()
MAX_GROUPS: Final = _cpu.MAX_GROUPS if _AVAILABLE else 256  # of experts, in a `Routing`


def accepts(x: Any) -> bool:
    """Return whether these operations can be used for a tensor."""
    return _AVAILABLE and is_in_main_memory(x) and is_float32(x) and is_contiguous(x)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Return `x / sqrt(mean(x^2) + eps) * weight` over the last dimension.

    Shapes: x [..., H], weight [H] -> [..., H].
    """
    return _normalise(x, weight, None, eps, subtracts_mean=False)


def layer_norm(x: Array, weight: Array, bias: Array | None, eps: float) -> Array:
    """Return `(x - mean(x)) / sqrt(var(x) + eps) * weight + bias` over the last dimension.

    Shapes: x [..., H], weight and bias [H] -> [..., H].
    """
    return _normalise(x, weight, bias, eps, subtracts_mean=True)


def _normalise(x: Array, weight: Array, bias: Array | None, eps: float, *, subtracts_mean: bool) -> Array:
    size = x.shape[-1]
    out = floats_like(x, *x.shape)
    _cpu.normalise(
        x=address(x),
        norm=floats(weight, size),
        eps=eps,
        subtracts_mean=subtracts_mean,
        norm_bias=floats(bias, size),
        num_rows=math.prod(x.shape[:-1]),
        size=size,
        out=address(out),
    )
    return out


def route(router_logits: Array, top_k: int, routing: Any) -> tuple[Array, Array]:
    """Return each token's experts, best first, and their weights, by a handle of `Routing`, which has seen the sizes.

    Shapes: router_logits [T, E] -> topk_ids [T, K] int64, topk_weights [T, K] float32.
    """
    num_tokens, num_experts = router_logits.shape
    topk_ids = ids_like(router_logits, num_tokens, top_k)
    topk_weights = floats_like(router_logits, num_tokens, top_k)
    _cpu.route(
        routing=routing,
        logits=address(router_logits),
        num_rows=num_tokens,
        num_experts=num_experts,
        topk_ids=address(topk_ids),
        topk_weights=address(topk_weights),
    )
    return topk_ids, topk_weights


def limit_choices(capacity: Any, topk_ids: Array, topk_weights: Array, num_experts: int) -> None:
    """Set weights of dropped choices to 0, by a handle of `ExpertCapacity`. Shapes: [T, K] both."""
    num_tokens, top_k = topk_ids.shape
    _cpu.limit_choices(
        capacity=capacity,
        topk_ids=address(topk_ids),
        num_tokens=num_tokens,
        top_k=top_k,
        num_experts=num_experts,
        topk_weights=address(topk_weights),
    )


def bind_capacity(**fields: Any) -> Any:
    """Return a handle for `limit_choices` from the fields of the extension's; None without the extension."""
    return _cpu.ExpertCapacity(**fields) if extension.is_available() else None


def bind_routing(**fields: Any) -> Any:
    """Return a handle for `route` from the fields of the extension's `Routing`; None without the extension."""
    return _cpu.Routing(**fields) if extension.is_available() else None


def sample(logits: Any, samplings: Sequence[tuple[int, float, int, float, float, float]]) -> list[int]:
    """Sample tokens as `kernels.sample` says, whose `RowSampling` lists the fields.

    Shapes: logits [R, V].
    """
    num_rows, size = logits.shape
    tokens: list[int] = _cpu.sample(x=address(logits), num_rows=num_rows, size=size, samplings=samplings)
    return tokens


def attention_input(qkv: Array, heads: Heads, rotary: RotaryTable | None, blocks: KVBlocks, slots: Array) -> Array:
    """Prepare queries, keys and values, store K and V, and return the queries, which stay where they are.

    Shapes: qkv [T, (Q + 2 KV) * D], or [T, Q * D] without keys, overwritten; slots [T] int64 -> [T, Q, D].
    """
    num_heads, head_dim = heads.num_heads, heads.head_dim
    num_tokens, row = qkv.shape
    if row != heads.row_size or head_dim != blocks.head_dim:
        raise ValueError(f"rows of {row} values and blocks for heads of {blocks.head_dim} do not fit {heads}")
    check_interleaved(heads)
    if slots.shape[0] != num_tokens:
        raise ValueError(f"{slots.shape[0]} slots are not for {num_tokens} tokens")
    if rotary is not None:
        check_rotary(rotary, num_tokens, head_dim)
    _cpu.attention_input(
        cache=blocks.handle,
        qkv=address(qkv),
        num_tokens=num_tokens,
        num_heads=num_heads,
        q_norm=address(heads.q_norm),
        k_norm=address(heads.k_norm),
        norm_all_heads=heads.norms_all_heads,
        eps=heads.eps,
        clip=heads.clip or 0.0,
        cos=0 if rotary is None else address(rotary.cos),
        sin=0 if rotary is None else address(rotary.sin),
        rotary_dim=0 if rotary is None else rotary.dim,
        slots=address(slots),
        norms_last=heads.norms_last,
        is_interleaved=heads.is_interleaved,
        v_norm=address(heads.v_norm),
        has_keys=heads.has_keys,
    )
    queries = qkv[:, : num_heads * head_dim]
    return queries.reshape(num_tokens, num_heads, head_dim)


def check_interleaved(heads: Heads) -> None:
    """Raise ValueError if heads are too long for rotating neighbours in the extension."""
    if heads.is_interleaved and heads.head_dim > MAX_INTERLEAVED:
        raise ValueError(f"neighbours are rotated in heads of at most {MAX_INTERLEAVED} values, not {heads.head_dim}")


def check_rotary(rotary: RotaryTable, num_tokens: int, head_dim: int) -> None:
    """Raise ValueError unless a table is of so many tokens, and of no more dimensions than a head has."""
    if rotary.dim > head_dim:
        raise ValueError(f"{rotary.dim} dimensions cannot be rotated in heads of {head_dim}")
    for part in (rotary.cos, rotary.sin):
        floats(part, num_tokens, 1, rotary.dim)
