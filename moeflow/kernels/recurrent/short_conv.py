"""A convolution of each channel over its last few inputs, which may be gated before and behind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moeflow.kernels.arrays import is_float32
from moeflow.kernels.cpu import recurrent as cpu
from moeflow.kernels.on_demand import on_demand, torch
from moeflow.kernels.recurrent.state_sequences import LayerStates, StateSequences
from moeflow.kernels.triton import launching

if TYPE_CHECKING:
    from torch import Tensor

with on_demand(__name__):
    from moeflow.kernels.triton import short_conv as triton_conv


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: LayerStates,
    sequences: StateSequences,
    *,
    gates: tuple[Tensor, Tensor] | None = None,
    has_silu: bool = False,
) -> Tensor:
    """Return `function(bias + sum of weight * inputs)` of each channel's newest inputs, its sequence's alone.

    `gates`: x is multiplied by the first of them, the result by the second. States are the inputs that are still to be
    seen, oldest first: [taps - 1, C].

    Shapes: x and gates [T, C], whose rows may be parts of longer ones; weight [C, taps] float32, that of the newest
    input last; bias [C] float32 -> [T, C].
    """
    if cpu.accepts(x) and is_float32(weight):
        return cpu.short_conv(x, weight, bias, states, sequences, gates=gates, has_silu=has_silu)
    if launching.accepts(x):
        return triton_conv.short_conv(x, weight, bias, states, sequences, gates=gates, has_silu=has_silu)
    inputs = (x if gates is None else x * gates[0]).float()
    num_kept = weight.shape[1] - 1
    out = torch.empty_like(inputs)
    for sequence in sequences:
        rows = slice(sequence.first_row, sequence.first_row + sequence.num_tokens)
        seen = torch.cat([states.read(sequence.source, num_kept, x.shape[1]), inputs[rows]])
        out[rows] = sum(
            (seen[tap : tap + sequence.num_tokens] * weight[:, tap].float() for tap in range(num_kept + 1)),
            torch.zeros(()) if bias is None else bias.float(),
        )
        for count, slot in (*sequence.saves, (sequence.num_tokens, sequence.target)):
            states.write(slot, seen[count : count + num_kept])
    out = torch.nn.functional.silu(out) if has_silu else out
    out = out.to(x.dtype)
    return out if gates is None else out * gates[1]
