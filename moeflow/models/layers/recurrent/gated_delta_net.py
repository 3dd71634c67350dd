"""Gated DeltaNet: a short convolution of queries, keys and values, then a matrix of each head that maps keys to values.

A token's value replaces what the matrix has for its key, as much as its rate says, once all has faded by its decay
(2412.06464). What queries find is normalised for each head, and gated.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Final

from moeflow.core.model_config import ModelConfig
from moeflow.core.recurrent_config import GatedDeltaConfig
from moeflow.kernels.recurrent.recurrence_layer import RecurrenceLayer
from moeflow.kernels.recurrent.recurrent_mixer import MixerHeads, RecurrentMixer
from moeflow.models.layers.expert_weights import Destination
from moeflow.models.layers.linear import Linear
from moeflow.models.layers.recurrent.conv_weights import ConvWeights
from moeflow.models.layers.recurrent.recurrent_layer import RecurrentLayer
from moeflow.models.layers.weight_allocator import WeightAllocator

_LENGTH_EPS: Final = 1e-6  # of queries and keys


class GatedDeltaNet(RecurrentLayer):
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
        heads, conv_size, values = mixer.num_heads, mixer.conv_size, mixer.values_size
        parts = {"in_proj_qkv": conv_size, "in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
        if is_by_key_heads:
            parts = {"in_proj_qkvz": conv_size + values, "in_proj_ba": 2 * heads}
        in_proj = Linear(allocator, config.hidden_size, parts, order=_order_of(mixer) if is_by_key_heads else ())
        self._conv = ConvWeights(allocator, conv_size, mixer.kernel_size, bias=False)
        self._step_bias, self._log_decay = allocator.empty_float32(heads), allocator.empty_float32(heads)
        layer = RecurrenceLayer(
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
            key_heads_take_turns=mixer.key_heads_take_turns,
        )
        self._norm = allocator.empty_float32(mixer.value_dim)
        queries_at, keys_at, values_at = accumulate(mixer.qkv_sizes[:2], initial=0)
        found = MixerHeads(
            layer,
            queries_at=queries_at,
            keys_at=keys_at,
            values_at=values_at,
            steps_at=conv_size + values + heads,
            rates_at=conv_size + values,
            norm=self._norm.reshape(1, -1),
            norm_eps=config.norms.eps,
            norm_gates_at=conv_size,
            is_gated_first=False,
        )
        super().__init__(
            layer_idx,
            in_proj,
            RecurrentMixer(mixer.in_features, self._conv.weight, None, has_silu=True, heads=found),
            Linear(allocator, values, {"out_proj": config.hidden_size}),
        )

    def named_weights(self, prefix: str) -> Iterator[tuple[str, Destination]]:
        """Yield (checkpoint name, destination)."""
        yield from self.in_proj.named_weights(prefix)
        yield from self._conv.named_weights(f"{prefix}.conv1d")
        yield f"{prefix}.dt_bias", self._step_bias
        yield f"{prefix}.A_log", self._log_decay
        yield f"{prefix}.norm.weight", self._norm
        yield from self.out_proj.named_weights(prefix)


def _order_of(mixer: GatedDeltaConfig) -> list[range]:
    """Return where queries, keys, values, gates, rates and steps of all heads are among those of each key head.

    There lie for each key head its query, its key, the values and the gates of its heads; then rates and steps
    likewise.
    """
    per_key = mixer.num_heads // mixer.num_key_heads
    first = [mixer.key_dim, mixer.key_dim, per_key * mixer.value_dim, per_key * mixer.value_dim]
    second = [per_key, per_key]
    order = _of_key_heads(first, 0, mixer.num_key_heads)
    return order + _of_key_heads(second, mixer.num_key_heads * sum(first), mixer.num_key_heads)


def _of_key_heads(sizes: list[int], start: int, num_key_heads: int) -> list[range]:
    """Regroup rows stored per key head: each part of all key heads, then the next part."""
    return [
        range(at := start + number * sum(sizes) + before, at + size)
        for before, size in zip(accumulate(sizes, initial=0), sizes, strict=False)
        for number in range(num_key_heads)
    ]
