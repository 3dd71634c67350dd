"""Operations of the CPU extension on rows of float32, each row by itself: the same bits alone and in any batch.

Few rows are computed by the calling thread alone, because waking another takes longer. Every x here is one that
`accepts` has been asked about: these calls take a microsecond, of which a second look would be a third.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moeflow.kernels.attention.heads import Heads
from moeflow.kernels.attention.kv_blocks import KVBlocks
from moeflow.kernels.cpu import extension
from moeflow.kernels.cpu.arguments import address

if extension.is_available():
    import moeflow.kernels._cpu as _cpu

_AVAILABLE = extension.is_available()


def accepts(x: Tensor) -> bool:
    """Return whether these operations can be used for a tensor."""
    return _AVAILABLE and x.is_cpu and x.dtype is torch.float32 and x.is_contiguous()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return `x / sqrt(mean(x^2) + eps) * weight` over the last dimension.

    Shapes: x [..., H], weight [H] -> [..., H].
    """
    size = x.shape[-1]
    if weight.dtype is not torch.float32 or weight.shape != (size,):
        raise ValueError(f"rows of {size} float32 values cannot be scaled by {weight.dtype} {list(weight.shape)}")
    out = torch.empty_like(x)
    _cpu.rms_norm(
        x=x.data_ptr(),
        weight=weight.data_ptr(),
        eps=eps,
        num_rows=x.numel() // size,
        size=size,
        out=out.data_ptr(),
    )
    return out


def softmax_topk(router_logits: Tensor, top_k: int, *, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Return the `top_k` likeliest experts of each token and their weights; of equals, the lower number first.

    Shapes: router_logits [T, E] -> topk_ids [T, K] int64, topk_weights [T, K] float32.
    """
    num_tokens, num_experts = router_logits.shape
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"{top_k} of {num_experts} experts cannot be chosen")
    topk_ids = torch.empty(num_tokens, top_k, dtype=torch.int64)
    topk_weights = torch.empty(num_tokens, top_k)
    _cpu.softmax_topk(
        logits=router_logits.data_ptr(),
        num_rows=num_tokens,
        num_experts=num_experts,
        top_k=top_k,
        renormalize=renormalize,
        topk_ids=topk_ids.data_ptr(),
        topk_weights=topk_weights.data_ptr(),
    )
    return topk_ids, topk_weights


def argmax(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the maximum of each row, NaN if it has one, and the first place where it stands.

    Shapes: x [R, V] -> values [R] float32, indices [R] int64.
    """
    num_rows, size = x.shape
    if not size:
        raise ValueError("an empty row has no maximum")
    values, indices = torch.empty(num_rows), torch.empty(num_rows, dtype=torch.int64)
    _cpu.argmax(x=x.data_ptr(), num_rows=num_rows, size=size, values=values.data_ptr(), indices=indices.data_ptr())
    return values, indices


def sample(logits: Tensor, samplings: Sequence[tuple[int, float, float, int, float, float, float]]) -> list[int]:
    """Sample tokens as `kernels.sample` says, whose `RowSampling` lists the fields.

    Shapes: logits [R, V].
    """
    num_rows, size = logits.shape
    tokens: list[int] = _cpu.sample(x=logits.data_ptr(), num_rows=num_rows, size=size, samplings=samplings)
    return tokens


def attention_input(qkv: Tensor, heads: Heads, cos: Tensor, sin: Tensor, blocks: KVBlocks, slots: Tensor) -> Tensor:
    """Prepare queries, keys and values, store K and V, and return the queries, which stay where they are.

    Shapes: qkv [T, (Q + 2 KV) * D], overwritten; cos and sin [T, 1, D]; slots [T] int64 -> [T, Q, D].
    """
    num_heads, head_dim = heads.num_heads, heads.head_dim
    num_tokens, row = qkv.shape
    if row != (num_heads + 2 * heads.num_kv_heads) * head_dim or head_dim != blocks.head_dim:
        raise ValueError(f"rows of {row} values and blocks for heads of {blocks.head_dim} do not fit {heads}")
    if cos.dtype is not torch.float32 or cos.numel() != num_tokens * head_dim or slots.shape[0] != num_tokens:
        raise ValueError(f"{list(cos.shape)} {cos.dtype} and {slots.shape[0]} slots are not for {num_tokens} tokens")
    _cpu.attention_input(
        cache=blocks.handle,
        qkv=qkv.data_ptr(),
        num_tokens=num_tokens,
        num_heads=num_heads,
        q_norm=address(heads.q_norm),
        k_norm=address(heads.k_norm),
        norm_all_heads=heads.norms_all_heads,
        eps=heads.eps,
        clip=heads.clip or 0.0,
        cos=cos.data_ptr(),
        sin=sin.data_ptr(),
        slots=slots.data_ptr(),
    )
    return qkv.as_strided((num_tokens, num_heads, head_dim), (row, head_dim, 1))
