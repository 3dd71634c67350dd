"""What a feed-forward network makes of its hidden units."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

from moeflow.kernels.on_demand import torch

if TYPE_CHECKING:
    from torch import Tensor


# x * sigmoid(x); x * Phi(x), exactly and by the usual tanh; max(x, 0)
Nonlinearity = Literal["silu", "gelu", "gelu_tanh", "relu"]

NONLINEARITIES: Final[tuple[Nonlinearity, ...]] = ("silu", "gelu", "gelu_tanh", "relu")


def apply(function: Nonlinearity, x: Tensor) -> Tensor:
    """Return the function of each value."""
    match function:
        case "silu":
            return torch.nn.functional.silu(x)
        case "gelu":
            return torch.nn.functional.gelu(x)
        case "gelu_tanh":
            return torch.nn.functional.gelu(x, approximate="tanh")
        case "relu":
            return torch.relu(x)


def apply_and_mul(function: Nonlinearity, gate_up: Tensor) -> Tensor:
    """Return `function(gate) * up`, where gate is the first half of the last dimension and up the second.

    Shapes: gate_up [T, 2I] -> [T, I].
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return apply(function, gate).mul_(up)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return `silu(gate) * up`; see `apply_and_mul`."""
    return apply_and_mul("silu", gate_up)
