"""Grouped-query self-attention with rotary positions: projections on either side of the paged attention kernel.

Families differ in biases, in clipping and in whether queries and keys are normalised, per head or over all heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor, nn

from moeflow.core.model_config import ModelConfig
from moeflow.kernels.attention import attend, write_kv
from moeflow.kernels.rotary import apply_rotary
from moeflow.layers.context import ForwardContext
from moeflow.layers.linear import Linear
from moeflow.layers.norm import RMSNorm
from moeflow.layers.placement import Placement
from moeflow.layers.rotary import RotaryTable

QKNorm = Literal["per_head", "all_heads"]


class Attention(nn.Module):
    """The attention of one layer."""

    def __init__(self, config: ModelConfig, place: Placement, layer_idx: int, qk_norm: QKNorm | None = None) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        self.sliding_window = config.sliding_window
        self.clip_qkv = config.clip_qkv
        self.qk_norm = qk_norm
        self.q_size = config.num_heads * config.head_dim
        self.kv_size = config.num_kv_heads * config.head_dim
        parts = {"q_proj": self.q_size, "k_proj": self.kv_size, "v_proj": self.kv_size}
        self.qkv_proj = Linear(place, config.hidden_size, parts, bias=config.attention_bias)
        self.o_proj = Linear(place, self.q_size, {"o_proj": config.hidden_size}, bias=config.attention_bias)
        if qk_norm is not None:
            per_head = qk_norm == "per_head"
            self.q_norm = RMSNorm(place, self.head_dim if per_head else self.q_size, config.rms_norm_eps)
            self.k_norm = RMSNorm(place, self.head_dim if per_head else self.kv_size, config.rms_norm_eps)

    def project(self, hidden: Tensor, rotary: RotaryTable) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [T, Q, D], k and v [T, KV, D], q and k rotated. Shapes: hidden [T, H]."""
        qk, v = torch.split(self.qkv_proj(hidden), [self.q_size + self.kv_size, self.kv_size], dim=-1)
        if self.qk_norm is not None:
            qk = self._normalise(qk)
        if self.clip_qkv is not None:
            qk, v = qk.clamp(-self.clip_qkv, self.clip_qkv), v.clamp(-self.clip_qkv, self.clip_qkv)
        rotated = apply_rotary(
            qk.view(len(qk), self.num_heads + self.num_kv_heads, self.head_dim), rotary.cos, rotary.sin
        )
        q, k = torch.split(rotated, [self.num_heads, self.num_kv_heads], dim=1)
        return q, k, v.view(len(v), self.num_kv_heads, self.head_dim)

    def _normalise(self, qk: Tensor) -> Tensor:
        """Shapes: qk [T, (Q + KV) * D] -> the same."""
        q, k = torch.split(qk, [self.q_size, self.kv_size], dim=-1)
        if self.qk_norm == "per_head":
            q = q.view(len(q), self.num_heads, self.head_dim)
            k = k.view(len(k), self.num_kv_heads, self.head_dim)
        return torch.cat((self.q_norm(q).flatten(1), self.k_norm(k).flatten(1)), dim=-1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: ForwardContext) -> Tensor:
        """Store k and v, attend, and return [T, Q * D]."""
        blocks = context.kv.layer(self.layer_idx)
        write_kv(k, v, blocks, context.attention)
        return attend(q, blocks, context.attention, sliding_window=self.sliding_window)

    def named_weights(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """Yield (checkpoint name, destination)."""
        yield from self.qkv_proj.named_weights(prefix)
        yield from self.o_proj.named_weights(prefix)
        if self.qk_norm is not None:
            yield f"{prefix}.q_norm.weight", self.q_norm.weight
            yield f"{prefix}.k_norm.weight", self.k_norm.weight
