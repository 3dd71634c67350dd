"""LFM2's short convolution: `out_proj(C * conv(B * x))`, with B, C and x from one projection."""

from __future__ import annotations

from collections.abc import Iterator

from moeflow.core.model_config import ModelConfig
from moeflow.core.recurrent_config import ShortConvConfig
from moeflow.kernels.recurrent.recurrent_mixer import RecurrentMixer
from moeflow.models.layers.expert_weights import Destination
from moeflow.models.layers.linear import Linear
from moeflow.models.layers.recurrent.conv_weights import ConvWeights
from moeflow.models.layers.recurrent.recurrent_layer import RecurrentLayer
from moeflow.models.layers.weight_allocator import WeightAllocator


class ShortConv(RecurrentLayer):
    """The mixer of one layer; its state is the last inputs of each channel's convolution."""

    def __init__(self, config: ModelConfig, allocator: WeightAllocator, layer_idx: int, mixer: ShortConvConfig) -> None:
        hidden, size, bias = config.hidden_size, mixer.num_channels, mixer.has_bias
        in_proj = Linear(allocator, hidden, {"in_proj": mixer.in_features}, bias=bias)
        self._conv = conv = ConvWeights(allocator, size, mixer.kernel_size, bias=bias)
        super().__init__(
            layer_idx,
            in_proj,
            RecurrentMixer(mixer.in_features, conv.weight, conv.bias, conv_at=2 * size, conv_gates_at=(0, size)),
            Linear(allocator, mixer.out_features, {"out_proj": hidden}, bias=bias),
        )

    def named_weights(self, prefix: str) -> Iterator[tuple[str, Destination]]:
        """Yield (checkpoint name, destination)."""
        yield from self.in_proj.named_weights(prefix)
        yield from self._conv.named_weights(f"{prefix}.conv")
        yield from self.out_proj.named_weights(prefix)
