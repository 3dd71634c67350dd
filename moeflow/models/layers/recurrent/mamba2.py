"""Mamba2's mixer: a short convolution, then a matrix per head that maps keys to values and fades by one decay per token
(2405.21060).

What queries find, and a share of the value itself, is gated, and normalised for each group of heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from moeflow.core.model_config import ModelConfig
from moeflow.core.recurrent_config import Mamba2Config
from moeflow.kernels.recurrent.recurrence_layer import RecurrenceLayer
from moeflow.kernels.recurrent.recurrent_mixer import MixerHeads, RecurrentMixer
from moeflow.models.layers.expert_weights import Destination
from moeflow.models.layers.linear import Linear
from moeflow.models.layers.recurrent.conv_weights import ConvWeights
from moeflow.models.layers.recurrent.recurrent_layer import RecurrentLayer
from moeflow.models.layers.weight_allocator import WeightAllocator


class Mamba2(RecurrentLayer):
    """The mixer of one layer; its state is the last inputs of the convolution, then the heads' matrices.

    A token is projected to gates, values, keys, queries and steps.
    """

    def __init__(self, config: ModelConfig, allocator: WeightAllocator, layer_idx: int, mixer: Mamba2Config) -> None:
        heads, values, size = mixer.num_heads, mixer.values_size, config.hidden_size
        in_proj = Linear(allocator, size, {"in_proj": mixer.in_features}, bias=mixer.has_bias)
        self._conv = conv = ConvWeights(allocator, mixer.conv_size, mixer.kernel_size, bias=mixer.has_conv_bias)
        self._step_bias, self._log_decay, self._skip = (allocator.empty_float32(heads) for _ in range(3))
        layer = RecurrenceLayer(
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
        self._norm = allocator.empty_float32(values)
        values_at, keys_at, queries_at = accumulate(mixer.xbc_sizes[:2], initial=0)
        found = MixerHeads(
            layer,
            queries_at=queries_at,
            keys_at=keys_at,
            values_at=values_at,
            steps_at=values + mixer.conv_size,
            rates_at=None,
            norm=self._norm.reshape(mixer.num_groups, -1),
            norm_eps=mixer.norm_eps,
            norm_gates_at=0,
            is_gated_first=True,
        )
        super().__init__(
            layer_idx,
            in_proj,
            RecurrentMixer(mixer.in_features, conv.weight, conv.bias, conv_at=values, has_silu=True, heads=found),
            Linear(allocator, values, {"out_proj": size}, bias=mixer.has_bias),
        )

    def named_weights(self, prefix: str) -> Iterator[tuple[str, Destination]]:
        """Yield (checkpoint name, destination)."""
        yield from self.in_proj.named_weights(prefix)
        yield from self._conv.named_weights(f"{prefix}.conv1d")
        yield f"{prefix}.dt_bias", self._step_bias
        yield f"{prefix}.A_log", self._log_decay
        yield f"{prefix}.D", self._skip
        yield f"{prefix}.norm.weight", self._norm
        yield from self.out_proj.named_weights(prefix)
