"""The mixer of a layer that keeps a state, an operation after another: what all kinds of mixers have in common."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from moeflow.kernels.recurrent.gates import gated_norm
from moeflow.kernels.recurrent.recurrence import recurrence
from moeflow.kernels.recurrent.recurrence_layer import RecurrenceInput
from moeflow.kernels.recurrent.recurrent_mixer import RecurrentMixer
from moeflow.kernels.recurrent.short_conv import short_conv
from moeflow.kernels.recurrent.state_sequences import LayerStates, StateSequences

if TYPE_CHECKING:
    from torch import Tensor


def mix(mixer: RecurrentMixer, projected: Tensor, states: LayerStates, sequences: StateSequences) -> Tensor:
    """Have each token see those before it in its sequence. Shapes: projected [T, in_size] -> [T, out_size]."""
    size, at = mixer.num_channels, mixer.conv_gates_at
    convolved = short_conv(
        _part(projected, mixer.conv_at, size),
        mixer.conv_weight,
        mixer.conv_bias,
        states,
        sequences,
        gates=None if at is None else (_part(projected, at[0], size), _part(projected, at[1], size)),
        has_silu=mixer.has_silu,
    )
    heads = mixer.heads
    if heads is None:
        return convolved
    layer = heads.layer
    of_keys, of_values = layer.num_key_heads * layer.key_dim, heads.out_size
    given = RecurrenceInput(
        queries=_part(convolved, heads.queries_at, of_keys),
        keys=_part(convolved, heads.keys_at, of_keys),
        values=_part(convolved, heads.values_at, of_values),
        steps=_part(projected, heads.steps_at, layer.num_heads),
        rates=None if heads.rates_at is None else _part(projected, heads.rates_at, layer.num_heads),
    )
    found = recurrence(layer, given, replace(states, offset=mixer.conv_state_values), sequences)
    gates = _part(projected, heads.norm_gates_at, of_values)
    return gated_norm(found, gates, heads.norm, heads.norm_eps, is_gated_first=heads.is_gated_first)


def _part(rows: Tensor, first: int, size: int) -> Tensor:
    return rows[:, first : first + size]
