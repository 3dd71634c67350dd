"""Linear attention with decay: each head's state is a matrix that maps keys to values; old entries fade.

With the delta rule it is Gated DeltaNet's (2412.06464), without it Mamba2's (2405.21060).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moeflow.kernels.arrays import is_float32
from moeflow.kernels.cpu import recurrent as cpu
from moeflow.kernels.on_demand import on_demand, torch
from moeflow.kernels.recurrent.recurrence_layer import RecurrenceInput, RecurrenceLayer
from moeflow.kernels.recurrent.state_sequences import LayerStates, StateSequences
from moeflow.kernels.triton import launching

if TYPE_CHECKING:
    from torch import Tensor

with on_demand(__name__):
    from moeflow.kernels.triton import chunked_recurrence
    from moeflow.kernels.triton import recurrence as triton_recurrence


def recurrence(
    layer: RecurrenceLayer, given: RecurrenceInput, states: LayerStates, sequences: StateSequences
) -> Tensor:
    """Return what each token's queries find once it is taken up, [T, heads * value_dim].

    For each head: S = decay S; v' = rate (v - S^T k) with the delta rule, else rate v; S += k v'^T; S^T q + skip v.
    """
    if cpu.accepts(given.values) and is_float32(layer.step_bias):
        return cpu.recurrence(layer, given, states, sequences)
    if launching.accepts(given.values):
        if chunked_recurrence.suits(given.values, sequences):
            return chunked_recurrence.recurrence(layer, given, states, sequences)
        return triton_recurrence.recurrence(layer, given, states, sequences)
    steps = torch.nn.functional.softplus(given.steps.float() + layer.step_bias.float())
    steps = steps.clamp(layer.least_step, layer.most_step)
    decays = torch.exp(-torch.exp(layer.log_decay.float()) * steps)[..., None, None]
    rates = (steps if given.rates is None else given.rates.float().sigmoid())[..., None]
    queries, keys = (_keys(layer, x) for x in (given.queries, given.keys))
    queries = queries * layer.query_scale
    values = given.values.float().reshape(-1, layer.num_heads, layer.value_dim)
    out = torch.empty_like(values)
    for sequence in sequences:
        saves = dict(sequence.saves)
        state = states.read(sequence.source, layer.num_heads, layer.key_dim, layer.value_dim)
        for number in range(sequence.num_tokens):
            row = sequence.first_row + number
            state = state * decays[row]
            added = values[row]
            if layer.is_delta:
                added = added - torch.einsum("hkv,hk->hv", state, keys[row])
            state = state + torch.einsum("hk,hv->hkv", keys[row], added * rates[row])
            out[row] = torch.einsum("hkv,hk->hv", state, queries[row])
            if number + 1 in saves:
                states.write(saves[number + 1], state)
        states.write(sequence.target, state)
    if layer.skip is not None:
        out += values * layer.skip.float()[:, None]
    return out.flatten(1).to(given.values.dtype)


def _keys(layer: RecurrenceLayer, x: Tensor) -> Tensor:
    """Return queries or keys for all heads: [T, heads, key_dim]."""
    x = x.float().reshape(-1, layer.num_key_heads, layer.key_dim)
    if layer.norm_eps is not None:
        x = x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + layer.norm_eps)
    num_shares = layer.num_heads // layer.num_key_heads
    return x.repeat(1, num_shares, 1) if layer.key_heads_take_turns else x.repeat_interleave(num_shares, dim=1)
