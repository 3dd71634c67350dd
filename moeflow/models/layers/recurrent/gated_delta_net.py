"""Gated DeltaNet: a short convolution of queries, keys and values, then a matrix of each head that maps keys to values.

A token's value replaces what the matrix has for its key, as much as its rate says, once all has faded by its decay
(2412.06464). What queries find is normalised for each head, and gated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from moeflow.core.model_config import ModelConfig
from moeflow.core.recurrent_config import GatedDeltaConfig
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

_LENGTH_EPS: Final = 1e-6  # of queries and keys


class GatedDeltaNet:
    """The mixer of one layer; its state is the last inputs of the convolution, then the heads' matrices."""

    def __init__(
        self,
        config: ModelConfig,
        allocator: WeightAllocator,
        layer_idx: int,
        mixer: GatedDeltaConfig,
        *,
        is_by_key_heads: bool,
    ) -> None:
        """`is_by_key_heads`: checkpoints have what belongs to a key head side by side, in two tensors; else in four."""
        self.layer_idx = layer_idx
        self._mixer, self._eps = mixer, config.rms_norm_eps
        heads, values = mixer.num_heads, mixer.values_size
        self._sizes = (mixer.conv_size, values, heads, heads)  # of what is convolved, gates, rates, steps
        parts = {"in_proj_qkv": mixer.conv_size, "in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
        if is_by_key_heads:
            parts = {"in_proj_qkvz": mixer.conv_size + values, "in_proj_ba": 2 * heads}
        self._order = _order_of(mixer) if is_by_key_heads else None
        self.in_proj = Linear(allocator, config.hidden_size, parts)
        self._conv = ConvWeights(allocator, mixer.conv_size, mixer.kernel_size, bias=False)
        self._step_bias, self._log_decay = allocator.empty_float32(heads), allocator.empty_float32(heads)
        self._layer = RecurrenceLayer(
            num_heads=heads,
            num_key_heads=mixer.num_key_heads,
            key_dim=mixer.key_dim,
            value_dim=mixer.value_dim,
            step_bias=self._step_bias,
            log_decay=self._log_decay,
            skip=None,
            is_delta=True,
            norm_eps=_LENGTH_EPS,
            query_scale=mixer.key_dim**-0.5,
        )
        self._norm: Tensor = allocator.empty_float32(mixer.value_dim)
        self.out_proj = Linear(allocator, values, {"out_proj": config.hidden_size})

    def mix(self, projected: Tensor, rotary: Sequence[RotaryTable], context: ForwardContext) -> Tensor:
        """See `TokenMixer`. Shapes: projected [T, P] -> [T, heads * value_dim]."""
        states, sequences = context.states_of(self.layer_idx)
        if self._order is not None:
            projected = projected[:, self._order]
        qkv, gates, rates, steps = torch.split(projected, list(self._sizes), dim=1)
        qkv = short_conv(qkv, self._conv.weight, None, states, sequences, has_silu=True)
        queries, keys, values = torch.split(qkv, list(self._mixer.qkv_sizes), dim=1)
        found = recurrence(
            self._layer,
            RecurrenceInput(queries, keys, values, steps, rates),
            replace(states, offset=self._mixer.conv_state_values),
            sequences,
        )
        return gated_norm(found, gates, self._norm.unsqueeze(0), self._eps, is_gated_first=False)

    def named_weights(self, prefix: str) -> Iterator[tuple[str, Destination]]:
        """Yield (checkpoint name, destination)."""
        yield from self.in_proj.named_weights(prefix)
        yield from self._conv.named_weights(f"{prefix}.conv1d")
        yield f"{prefix}.dt_bias", self._step_bias
        yield f"{prefix}.A_log", self._log_decay
        yield f"{prefix}.norm.weight", self._norm
        yield from self.out_proj.named_weights(prefix)


def _order_of(mixer: GatedDeltaConfig) -> Tensor:
    """Return where queries, keys, values, gates, rates and steps of all heads are among those of each key head.

    There lie for each key head its query, its key, the values and the gates of its heads; then rates and steps
    likewise.
    """
    per_key = mixer.num_heads // mixer.num_key_heads
    wide = [mixer.key_dim, mixer.key_dim, per_key * mixer.value_dim, per_key * mixer.value_dim]
    first = torch.arange(mixer.num_key_heads * sum(wide)).reshape(mixer.num_key_heads, -1)
    second = first.numel() + torch.arange(2 * mixer.num_heads).reshape(mixer.num_key_heads, -1)
    parts = [*torch.split(first, wide, dim=1), *torch.split(second, [per_key, per_key], dim=1)]
    return torch.cat([part.reshape(-1) for part in parts])
