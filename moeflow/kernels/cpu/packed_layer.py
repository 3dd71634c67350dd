"""A layer of a decoder as the CPU extension takes it: its weights, and what mixes its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from moeflow.kernels.arrays import Array, address
from moeflow.kernels.attention.heads import Heads
from moeflow.kernels.attention.scores import Scores
from moeflow.kernels.cpu import extension
from moeflow.kernels.cpu.arguments import floats
from moeflow.kernels.cpu.latent_attention import PackedLatents
from moeflow.kernels.cpu.layer_input import PackedLayerInput
from moeflow.kernels.cpu.packed_weight import PackedWeight
from moeflow.kernels.cpu.row_ops import check_interleaved
from moeflow.kernels.cpu.stages import MoEStage, bind_norm
from moeflow.kernels.norm import NormWeights
from moeflow.kernels.on_demand import on_demand

if TYPE_CHECKING:
    from moeflow.kernels.recurrent.recurrent_mixer import RecurrentMixer

with on_demand(__name__):
    from moeflow.kernels.cpu import recurrent

if extension.is_available():
    import moeflow.kernels._cpu as _cpu


class PackedAttention(msgspec.Struct, frozen=True):
    """How a layer attends."""

    heads: Heads
    scores: Scores  # without a bias
    rotary: int | None  # which of a pass's tables it rotates by; None: it does not
    latents: PackedLatents | None = None  # of latent attention: `heads` then attend to latents
    is_gated: bool = False  # by as many values as it returns, which follow queries, keys and values; not with latents
    layers_back: int = 0  # before this one, to the layer whose keys and values it attends to; 0: it has its own

    @property
    def in_size(self) -> int:
        """Values of a token that it takes."""
        heads = self.heads
        if self.latents is not None:
            return self.latents.projected_size
        return heads.row_size + (heads.num_heads * heads.head_dim if self.is_gated else 0)

    @property
    def out_size(self) -> int:
        """Values of a token that it returns."""
        return self.heads.num_heads * (self.heads.head_dim if self.latents is None else self.latents.heads.value_dim)

    def bind(self) -> object:
        """Return it for the extension, which looks at the memory of its weights. Raises: ValueError."""
        heads, scores = self.heads, self.scores
        check_interleaved(heads)
        assert scores.bias is None, "a layer with relative positions is no decoder's"
        return _cpu.AttentionLayer(
            num_heads=heads.num_heads,
            q_norm=address(heads.q_norm),
            k_norm=address(heads.k_norm),
            v_norm=address(heads.v_norm),
            norm_all_heads=heads.norms_all_heads,
            clip=heads.clip or 0.0,
            sliding_window=scores.sliding_window or 0,
            scale=scores.scale or 0.0,
            soft_cap=scores.soft_cap or 0.0,
            sinks=floats(scores.sinks, heads.num_heads),
            rotary=-1 if self.rotary is None else self.rotary,
            norms_last=heads.norms_last,
            is_interleaved=heads.is_interleaved,
            is_gated=self.is_gated,
            latent=None if self.latents is None else self.latents.handle,
            has_keys=heads.has_keys,
        )


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """The weights of one layer."""

    in_proj: Sequence[PackedWeight]  # to the mixer's inputs: one matrix, or several stacked ones
    in_bias: Array | None
    input_norm: NormWeights
    mixer: PackedAttention | RecurrentMixer
    stage: MoEStage  # what follows
    order: Sequence[range] = ()  # places of the mixer's inputs in the projection; empty: all of it
    layer_input: PackedLayerInput | None = None  # the last network; None if experts are elsewhere

    @property
    def hidden(self) -> int:
        """The size of hidden states."""
        return self.in_proj[0].cols

    @property
    def attention(self) -> PackedAttention | None:
        """How it attends; None: it keeps a state."""
        return self.mixer if isinstance(self.mixer, PackedAttention) else None

    def bind(self) -> Any:
        """Return it for the extension, which looks at the memory of its weights. Raises: ValueError."""
        mixer, stage = self.mixer, self.stage
        num_rows = sum(part.rows for part in self.in_proj)
        num_mixed = sum(len(part) for part in self.order) if self.order else num_rows
        if num_mixed != mixer.in_size or stage.o_proj.cols != mixer.out_size:
            raise ValueError(f"{self.in_proj}, {mixer} and {stage.o_proj} do not match")
        if any(part.start < 0 or part.stop > num_rows or part.step != 1 for part in self.order):
            raise ValueError(f"{self.order} are not all among {num_rows} values")
        return _cpu.DecoderLayer(
            in_proj=[part.handle for part in self.in_proj],
            in_bias=floats(self.in_bias, num_rows),
            input_norm=bind_norm(self.input_norm, self.hidden),
            order=[(part.start, len(part)) for part in self.order],
            attention=mixer.bind() if isinstance(mixer, PackedAttention) else None,
            recurrent=None if isinstance(mixer, PackedAttention) else recurrent.bind_mixer(mixer),
            stage=stage.handle,
            input=None if self.layer_input is None else self.layer_input.handle,
        )
