"""The gated activation of a SwiGLU feed-forward network."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return `silu(gate) * up`, where gate is the first half of the last dimension and up the second.

    Shapes: gate_up [T, 2I] -> [T, I].
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
