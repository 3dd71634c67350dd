"""What a feed-forward network makes of its hidden units."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import msgspec

from moeflow.kernels.on_demand import on_demand, torch
from moeflow.kernels.triton import launching

if TYPE_CHECKING:
    from torch import Tensor

with on_demand(__name__):
    from moeflow.kernels.triton import activation as triton_activation

# x * sigmoid(x); x * Phi(x), exactly and by the usual tanh; max(x, 0)
Nonlinearity = Literal["silu", "gelu", "gelu_tanh", "relu"]

NONLINEARITIES: Final[tuple[Nonlinearity, ...]] = ("silu", "gelu", "gelu_tanh", "relu")


class ClampedSwiglu(msgspec.Struct, frozen=True):
    """`(up + 1) * gate * sigmoid(alpha * gate)`, with gates of at most `limit` and ups within it (gpt-oss)."""

    alpha: float
    limit: float


Activation: TypeAlias = Nonlinearity | ClampedSwiglu


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


def apply_and_mul(function: Activation, gate_up: Tensor) -> Tensor:
    """Return `function(gate) * up`, where gate is the first half of the last dimension and up the second.

    Shapes: gate_up [T, 2I] -> [T, I].
    """
    if launching.accepts(gate_up):
        if isinstance(function, ClampedSwiglu):
            return triton_activation.apply_and_mul(
                gate_up, "clamped_swiglu", alpha=function.alpha, limit=function.limit
            )
        return triton_activation.apply_and_mul(gate_up, function)
    gate, up = gate_up.chunk(2, dim=-1)
    if isinstance(function, ClampedSwiglu):
        gate, up = gate.clamp(max=function.limit), up.clamp(-function.limit, function.limit)
        return torch.sigmoid(gate * function.alpha).mul_(gate).mul_(up + 1)
    return apply(function, gate).mul_(up)


def activate(function: Activation, ups: Tensor, *, is_gated: bool) -> Tensor:
    """Return hidden units from what gate, if there is one, and up gave. Shapes: ups [T, 2I] or [T, I] -> [T, I]."""
    if is_gated:
        return apply_and_mul(function, ups)
    assert not isinstance(function, ClampedSwiglu)
    return apply(function, ups)


def kernel_arguments(function: Activation) -> dict[str, float]:
    """Return the CPU extension's arguments for a function."""
    if isinstance(function, ClampedSwiglu):
        return {"function": len(NONLINEARITIES), "alpha": function.alpha, "limit": function.limit}
    return {"function": NONLINEARITIES.index(function), "alpha": 0.0, "limit": 0.0}
