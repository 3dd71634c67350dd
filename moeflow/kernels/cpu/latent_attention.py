"""Latent attention by the CPU extension: all between a layer's first projections and its output projection."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from moeflow.kernels.arrays import Array, address, floats_like
from moeflow.kernels.attention.attention_metadata import AttentionMetadata
from moeflow.kernels.attention.kv_blocks import KVBlocks
from moeflow.kernels.attention.latent_heads import LatentHeads
from moeflow.kernels.attention.scores import Scores
from moeflow.kernels.cpu import extension
from moeflow.kernels.cpu.arguments import floats
from moeflow.kernels.cpu.latent_weights import PackedUpProjection
from moeflow.kernels.cpu.packed_weight import PackedWeight
from moeflow.kernels.cpu.row_ops import check_rotary
from moeflow.kernels.cpu.stages import bind_norm
from moeflow.kernels.rotary import RotaryTable

if extension.is_available():
    import moeflow.kernels._cpu as _cpu


@dataclass(frozen=True, slots=True)
class PackedLatents:
    """The weights of one layer."""

    heads: LatentHeads
    q_b: PackedWeight | None  # up to queries; None: they are projected at once
    up: PackedUpProjection  # from latents to keys and values
    handle: Any = field(init=False, repr=False, compare=False)  # looks at the memory of all of these

    def __post_init__(self) -> None:
        heads, q_b, dims = self.heads, self.q_b, self.up.dims
        sizes = (dims.num_heads, dims.nope_dim, dims.value_dim, dims.latent_dim)
        fits = sizes == (heads.num_heads, heads.nope_dim, heads.value_dim, heads.latent_dim)
        fits &= (q_b is None) == (heads.q_norm is None)
        fits &= q_b is None or q_b.rows == heads.num_heads * heads.query_dim
        if not fits:
            raise ValueError(f"{heads}, {q_b} and {dims} do not match")
        handle = _cpu.LatentProjections(
            q_b=None if q_b is None else q_b.handle,
            q_norm=None if q_b is None or heads.q_norm is None else bind_norm(heads.q_norm, q_b.cols),
            latent_norm=bind_norm(heads.latent_norm, heads.latent_dim),
            k_b=self.up.keys.handle,
            v_b=self.up.values.handle,
            nope_dim=heads.nope_dim,
            value_dim=heads.value_dim,
            is_interleaved=heads.is_interleaved,
        )
        object.__setattr__(self, "handle", handle)

    @property
    def projected_size(self) -> int:
        """Number of a token's input values: queries or their latents, latent and rotary key."""
        heads = self.heads
        return (heads.num_heads * heads.query_dim if self.q_b is None else self.q_b.cols) + heads.key_dim

    def attend(
        self, projected: Array, rotary: RotaryTable, blocks: KVBlocks, metadata: AttentionMetadata, scores: Scores
    ) -> Array:
        """Store the latent and rotary key of each token, and attend. Only scale and window of `scores` are used.

        Shapes: projected [T, projected_size] -> [T, H * V].
        """
        heads = self.heads
        num_tokens = projected.shape[0]
        check_rotary(rotary, num_tokens, heads.rope_dim)
        if (blocks.head_dim, blocks.latent_dim, blocks.num_kv_heads) != (heads.key_dim, heads.latent_dim, 1):
            raise ValueError(f"blocks for keys of {blocks.head_dim}, values of {blocks.latent_dim} do not fit {heads}")
        assert scores.scale is not None
        out = floats_like(projected, num_tokens, heads.num_heads * heads.value_dim)
        _cpu.latent_attention(
            projections=self.handle,
            cache=blocks.handle,
            projected=floats(projected, num_tokens, self.projected_size),
            num_tokens=num_tokens,
            num_heads=heads.num_heads,
            rotary=_cpu.RotaryTable(cos=address(rotary.cos), sin=address(rotary.sin), dim=rotary.dim),
            slots=address(metadata.slots),
            num_sequences=len(metadata.spans),
            sequences=metadata.table.buffer_info()[0],
            sliding_window=scores.sliding_window or 0,
            tree_masks=address(metadata.tree_masks),
            scale=scores.scale,
            out=address(out),
        )
        return out
