"""Stages of a decoder layer by the CPU extension, several operations in one call: a pass of one token is then mostly
kernels. The results are those of the operations one after another, to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moeflow.kernels.cpu import extension
from moeflow.kernels.cpu.arguments import address, check_floats
from moeflow.kernels.cpu.packed_weights import PackedExperts, PackedWeight
from moeflow.kernels.routing import SoftmaxTopK

if extension.is_available():
    import moeflow.kernels._cpu as _cpu


def norm_linear(x: Tensor, norm: Tensor, eps: float, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """Return `rms_norm(x) @ weight.T + bias`. Shapes: x [T, H], norm [H], bias [N] -> [T, N], all float32."""
    num_tokens = x.shape[0]
    check_floats(x, (num_tokens, weight.cols))
    check_floats(norm, (weight.cols,))
    if bias is not None:
        check_floats(bias, (weight.rows,))
    out = torch.empty(num_tokens, weight.rows)
    _cpu.linear(
        weight.handle,
        x.data_ptr(),
        num_tokens,
        weight.cols,
        address(bias),
        0,
        out.data_ptr(),
        norm.data_ptr(),
        eps,
    )
    return out


@dataclass(frozen=True, slots=True)
class MoEStage:
    """All that follows attention in a layer of experts, or without a router in a dense one.

    That is `h + experts(rms_norm(h))` with `h = hidden + attended @ o_proj.T + o_bias`.
    """

    o_proj: PackedWeight
    o_bias: Tensor | None  # [H]
    norm: Tensor  # [H]
    eps: float
    router: PackedWeight | None  # None: every token goes to the one expert there is
    choose: SoftmaxTopK
    experts: PackedExperts
    # [E] int32, where each expert is among `experts`, or that it is not there: `PackedDecoder` can do without some.
    # None: all are there, in order.
    slots: Tensor | None = None

    def __post_init__(self) -> None:
        size, router, num_experts = self.o_proj.rows, self.router, self.num_experts
        check_floats(self.norm, (size,))
        if self.o_bias is not None:
            check_floats(self.o_bias, (size,))
        fits = self.experts.hidden == size
        if self.slots is None:
            fits &= self.experts.num_experts == num_experts
        else:
            fits &= self.slots.dtype == torch.int32 and self.slots.shape == (num_experts,) and router is not None
        fits &= router is None or router.cols == size
        if not fits or not 1 <= self.choose.top_k <= num_experts:
            raise ValueError(f"{self.o_proj}, {router}, {self.experts} and {self.choose} do not fit together")

    @property
    def num_experts(self) -> int:
        """How many the router chooses among."""
        return 1 if self.router is None else self.router.rows

    def __call__(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Shapes: hidden [T, H], attended [T, o_proj.cols], both float32 -> [T, H]. All experts must be there."""
        assert self.slots is None
        o_proj = self.o_proj
        num_tokens = hidden.shape[0]
        check_floats(hidden, (num_tokens, o_proj.rows))
        check_floats(attended, (num_tokens, o_proj.cols))
        out = torch.empty(num_tokens, o_proj.rows)
        _cpu.moe_stage(
            o_proj.handle,
            None if self.router is None else self.router.handle,
            self.experts.handle,
            self.choose.top_k,
            self.choose.renormalize,
            address(self.o_bias),
            self.norm.data_ptr(),
            self.eps,
            attended.data_ptr(),
            hidden.data_ptr(),
            num_tokens,
            out.data_ptr(),
        )
        return out
