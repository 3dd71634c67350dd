"""Mamba2's mixer: a short convolution, then a matrix of each head that maps keys to values, all of which fades by one
decay a token (2405.21060).

What queries find, and a share of the value itself, is gated, and normalised for each group of heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from moeflow.core.model_config import ModelConfig
from moeflow.core.recurrent_config import Mamba2Config
from moeflow.kernels.on_demand import torch
from moeflow.kernels.recurrent.gates import gated_norm
from moeflow.kernels.recurrent.recurrence import recurrence
from moeflow.kernels.recurrent.recurrence_layer import RecurrenceInput, RecurrenceLayer
from moeflow.kernels.recurrent.short_conv import short_conv
from moeflow.kernels.rotary import RotaryTable
from moeflow.models.layers.context import ForwardContext
from moeflow.models.layers.expert_weights import Destination
from moeflow.models.layers.linear import Linear
from moeflow.models.layers.recurrent.conv_weights import ConvWeights
from moeflow.models.layers.weight_allocator import WeightAllocator

if TYPE_CHECKING:
    from torch import Tensor


class Mamba2:
    """The mixer of one layer; its state is the last inputs of the convolution, then the heads' matrices."""

    def __init__(self, config: ModelConfig, allocator: WeightAllocator, layer_idx: int, mixer: Mamba2Config) -> None:
        self.layer_idx = layer_idx
        self._mixer = mixer
        heads, values, size = mixer.num_heads, mixer.values_size, config.hidden_size
        self.in_proj = Linear(allocator, size, {"in_proj": mixer.in_features}, bias=mixer.has_bias)
        self._conv = ConvWeights(allocator, mixer.conv_size, mixer.kernel_size, bias=mixer.has_conv_bias)
        self._step_bias, self._log_decay, self._skip = (allocator.empty_float32(heads) for _ in range(3))
        self._layer = RecurrenceLayer(
            num_heads=heads,
            num_key_heads=mixer.num_groups,
            key_dim=mixer.state_dim,
            value_dim=mixer.head_dim,
            step_bias=self._step_bias,
            log_decay=self._log_decay,
            skip=self._skip,
            is_delta=False,
            norm_eps=None,
            query_scale=1.0,
            least_step=mixer.least_step,
            most_step=mixer.most_step,
        )
        self._norm: Tensor = allocator.empty_float32(values)
        self.out_proj = Linear(allocator, values, {"out_proj": size}, bias=mixer.has_bias)

    def mix(self, projected: Tensor, rotary: Sequence[RotaryTable], context: ForwardContext) -> Tensor:
        """See `TokenMixer`. Shapes: projected [T, P] -> [T, heads * head_dim]."""
        mixer = self._mixer
        states, sequences = context.states_of(self.layer_idx)
        gates, xbc, steps = torch.split(projected, [mixer.values_size, mixer.conv_size, mixer.num_heads], dim=1)
        xbc = short_conv(xbc, self._conv.weight, self._conv.bias, states, sequences, has_silu=True)
        values, keys, queries = torch.split(xbc, list(mixer.xbc_sizes), dim=1)
        found = recurrence(
            self._layer,
            RecurrenceInput(queries, keys, values, steps, rates=None),
            replace(states, offset=mixer.conv_state_values),
            sequences,
        )
        weight = self._norm.view(mixer.num_groups, -1)
        return gated_norm(found, gates, weight, mixer.norm_eps, is_gated_first=True)

    def named_weights(self, prefix: str) -> Iterator[tuple[str, Destination]]:
        """Yield (checkpoint name, destination)."""
        yield from self.in_proj.named_weights(prefix)
        yield from self._conv.named_weights(f"{prefix}.conv1d")
        yield f"{prefix}.dt_bias", self._step_bias
        yield f"{prefix}.A_log", self._log_decay
        yield f"{prefix}.D", self._skip
        yield f"{prefix}.norm.weight", self._norm
        yield from self.out_proj.named_weights(prefix)
