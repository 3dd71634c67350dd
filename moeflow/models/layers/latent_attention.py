"""Attention over latents: projections down to them and up to queries on either side of the paged attention kernel.

Norms of down-projections are between projections, so queries may take two of these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from moeflow.core.model_config import ModelConfig
from moeflow.kernels.attention.attention_metadata import AttentionMetadata
from moeflow.kernels.attention.heads import Heads
from moeflow.kernels.attention.kv_blocks import KVBlocks
from moeflow.kernels.attention.latent_attention import attend_to_latents
from moeflow.kernels.attention.latent_heads import LatentHeads
from moeflow.kernels.attention.scores import Scores
from moeflow.kernels.cpu import row_ops
from moeflow.kernels.cpu.latent_attention import PackedLatents
from moeflow.kernels.cpu.latent_weights import PackedUpProjection, UpProjectionShape
from moeflow.kernels.cpu.packed_layer import PackedAttention
from moeflow.kernels.cpu.packed_weight import PackedWeight
from moeflow.kernels.on_demand import torch
from moeflow.kernels.rotary import RotaryTable
from moeflow.kernels.triton import launching
from moeflow.models.layers.context import ForwardContext
from moeflow.models.layers.expert_weights import Destination
from moeflow.models.layers.linear import Linear, output_linear
from moeflow.models.layers.norm import Norm
from moeflow.models.layers.weight_allocator import WeightAllocator

if TYPE_CHECKING:
    from torch import Tensor

KEPT: Final = "kv_a_proj_with_mqa"  # projects to latent and rotary key


class LatentAttention:
    """The attention of one layer of a model with `latent`."""

    def __init__(self, config: ModelConfig, allocator: WeightAllocator, layer_idx: int) -> None:
        attention = config.attention
        assert attention.latent is not None
        assert allocator.tensor_group is None, "whoever lays out ranks keeps latent attention whole"
        self.layer_idx = layer_idx
        latent = attention.latent
        kind = attention.of_layer(layer_idx)
        assert kind.rope is not None
        self.rotary = attention.ropes.index(kind.rope)  # which of a pass's tables
        self._q_size = attention.num_heads * latent.query_dim
        rank, bias = latent.q_lora_rank, attention.qkv_bias
        first = {"q_proj": self._q_size} if rank is None else {"q_a_proj": rank}
        self.qkv_proj = Linear(allocator, config.hidden_size, first | {KEPT: attention.head_dim}, bias=bias)
        self._q_norm = None if rank is None else Norm(allocator, rank, latent.norm_eps)
        self._q_b = None if rank is None else Linear(allocator, rank, {"q_b_proj": self._q_size})
        self._norm = Norm(allocator, latent.kv_lora_rank, latent.norm_eps)
        self._up = allocator.up_projection(
            UpProjectionShape(attention.num_heads, latent.nope_head_dim, latent.value_head_dim, latent.kv_lora_rank)
        )
        out_bias = attention.out_bias
        self.o_proj = output_linear(allocator, config.attended_size, "o_proj", config.hidden_size, bias=out_bias)
        self.scores = Scores(sliding_window=kind.sliding_window, scale=attention.score_scale)
        # As attention itself has them.
        self.heads = Heads(attention.num_heads, attention.num_kv_heads, attention.head_dim)
        self.latent_heads = LatentHeads(
            num_heads=attention.num_heads,
            nope_dim=latent.nope_head_dim,
            rope_dim=latent.rope_head_dim,
            latent_dim=latent.kv_lora_rank,
            value_dim=latent.value_head_dim,
            is_interleaved=kind.rope.is_interleaved,
            latent_norm=self._norm.weights,
            q_norm=None if self._q_norm is None else self._q_norm.weights,
        )
        self.latents = self._pack()

    def _pack(self) -> PackedLatents | None:
        """Return the weights for the CPU kernels; None if they are not packed."""
        q_b = None if self._q_b is None else self._q_b.weight
        if not isinstance(self._up, PackedUpProjection) or not (q_b is None or isinstance(q_b, PackedWeight)):
            return None
        return PackedLatents(self.latent_heads, q_b, self._up)

    @property
    def in_proj(self) -> Linear:
        """The projections of queries, latents and rotary keys."""
        return self.qkv_proj

    @property
    def out_proj(self) -> Linear:
        """The output projection."""
        return self.o_proj

    @property
    def order(self) -> Sequence[range]:
        """Queries, latents and rotary keys, as they are projected."""
        return ()

    def for_kernels(self) -> PackedAttention | None:
        """See `TokenMixer`."""
        return None if self.latents is None else PackedAttention(self.heads, self.scores, self.rotary, self.latents)

    def mix(self, projected: Tensor, rotary: Sequence[RotaryTable], context: ForwardContext) -> Tensor:
        """Store the latent and rotary key of each token in the cache, and attend.

        Shapes: projected [T, rows of `qkv_proj`] -> [T, H * V].
        """
        blocks: KVBlocks = context.kv.layer(self.layer_idx)
        table, metadata = rotary[self.rotary], context.attention
        if self.latents is not None and blocks.handle is not None and row_ops.accepts(projected):
            return self.latents.attend(projected, table, blocks, metadata, self.scores)
        return self._attend_in_torch(projected, table, blocks, metadata)

    def _attend_in_torch(
        self, projected: Tensor, table: RotaryTable, blocks: KVBlocks, metadata: AttentionMetadata
    ) -> Tensor:
        heads = self.latent_heads
        q, kept = torch.split(projected, [projected.shape[1] - heads.key_dim, heads.key_dim], dim=1)
        if self._q_b is not None and self._q_norm is not None:
            q = self._q_b.after_norm(q if launching.accepts(q) else q.contiguous(), self._q_norm)
        up = self._up
        weights = up.unpack() if isinstance(up, PackedUpProjection) else up.view(heads.num_heads, -1, heads.latent_dim)
        return attend_to_latents(q, kept, weights, heads, table, blocks, metadata, self.scores)

    def matrix_names(self, prefix: str) -> dict[str, list[str]]:
        """Return the checkpoint names of the matrices that each field of `LayerFormats` is about."""
        queries = ["q_proj"] if self._q_b is None else ["q_a_proj", "q_b_proj"]
        fields = {"q_proj": queries, "k_proj": [KEPT], "v_proj": [KEPT], "o_proj": ["o_proj"]}
        return {part: [f"{prefix}.{name}.weight" for name in names] for part, names in fields.items()}

    def named_weights(self, prefix: str) -> Iterator[tuple[str, Destination]]:
        """Yield (checkpoint name, destination)."""
        yield from self.qkv_proj.named_weights(prefix)
        if self._q_b is not None and self._q_norm is not None:
            yield from self._q_norm.named_weights(f"{prefix}.q_a_layernorm")
            yield from self._q_b.named_weights(prefix)
        yield from self._norm.named_weights(f"{prefix}.kv_a_layernorm")
        yield f"{prefix}.kv_b_proj.weight", self._up
        yield from self.o_proj.named_weights(prefix)
