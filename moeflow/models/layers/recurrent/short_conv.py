"""LFM2's short convolution: `out_proj(C * conv(B * x))`, with B, C and x from one projection."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from moeflow.core.model_config import ModelConfig
from moeflow.core.recurrent_config import ShortConvConfig
from moeflow.kernels.recurrent.short_conv import short_conv
from moeflow.kernels.rotary import RotaryTable
from moeflow.models.layers.context import ForwardContext
from moeflow.models.layers.expert_weights import Destination
from moeflow.models.layers.linear import Linear
from moeflow.models.layers.recurrent.conv_weights import ConvWeights
from moeflow.models.layers.weight_allocator import WeightAllocator

if TYPE_CHECKING:
    from torch import Tensor


class ShortConv:
    """The mixer of one layer; its state is the last inputs of each channel's convolution."""

    def __init__(self, config: ModelConfig, allocator: WeightAllocator, layer_idx: int, mixer: ShortConvConfig) -> None:
        self.layer_idx = layer_idx
        size, bias = config.hidden_size, mixer.has_bias
        self.in_proj = Linear(allocator, size, {"in_proj": mixer.in_features}, bias=bias)
        self._conv = ConvWeights(allocator, mixer.num_channels, mixer.kernel_size, bias=bias)
        self.out_proj = Linear(allocator, mixer.out_features, {"out_proj": size}, bias=bias)

    def mix(self, projected: Tensor, rotary: Sequence[RotaryTable], context: ForwardContext) -> Tensor:
        """See `TokenMixer`. Shapes: projected [T, 3C] -> [T, C]."""
        states, sequences = context.states_of(self.layer_idx)
        before, behind, x = projected.chunk(3, dim=1)
        return short_conv(x, self._conv.weight, self._conv.bias, states, sequences, gates=(before, behind))

    def named_weights(self, prefix: str) -> Iterator[tuple[str, Destination]]:
        """Yield (checkpoint name, destination)."""
        yield from self.in_proj.named_weights(prefix)
        yield from self._conv.named_weights(f"{prefix}.conv")
        yield from self.out_proj.named_weights(prefix)
