"""Stages of a decoder layer by the CPU extension, several operations in one call: a pass of one token is then mostly
kernels. The results are those of the operations one after another, to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moeflow.kernels import cpu
from moeflow.kernels.cpu import PackedExperts, PackedWeight
from moeflow.kernels.routing import SoftmaxTopK

if cpu.is_available():
    import moeflow.kernels._cpu as _cpu


def norm_linear(x: Tensor, norm: Tensor, eps: float, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """Return `rms_norm(x) @ weight.T + bias`. Shapes: x [T, H], norm [H], bias [N] -> [T, N], all float32."""
    num_tokens = x.shape[0]
    _check(x, (num_tokens, weight.cols))
    _check(norm, (weight.cols,))
    if bias is not None:
        _check(bias, (weight.rows,))
    out = torch.empty(num_tokens, weight.rows)
    _cpu.linear(
        weight.handle,
        x.data_ptr(),
        num_tokens,
        weight.cols,
        0 if bias is None else bias.data_ptr(),
        0,
        out.data_ptr(),
        norm.data_ptr(),
        eps,
    )
    return out


@dataclass(frozen=True, slots=True)
class MoEStage:
    """All that follows attention in a layer of experts.

    That is `h + experts(rms_norm(h))` with `h = hidden + attended @ o_proj.T + o_bias`.
    """

    o_proj: PackedWeight
    o_bias: Tensor | None  # [H]
    norm: Tensor  # [H]
    eps: float
    router: PackedWeight
    choose: SoftmaxTopK
    experts: PackedExperts

    def __post_init__(self) -> None:
        size, router = self.o_proj.rows, self.router
        _check(self.norm, (size,))
        if self.o_bias is not None:
            _check(self.o_bias, (size,))
        fits = router.cols == self.experts.hidden == size and router.rows == self.experts.num_experts
        if not fits or not 1 <= self.choose.top_k <= router.rows:
            raise ValueError(f"{self.o_proj}, {router}, {self.experts} and {self.choose} do not fit together")

    def __call__(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Shapes: hidden [T, H], attended [T, o_proj.cols], both float32 -> [T, H]."""
        o_proj = self.o_proj
        num_tokens = hidden.shape[0]
        _check(hidden, (num_tokens, o_proj.rows))
        _check(attended, (num_tokens, o_proj.cols))
        out = torch.empty(num_tokens, o_proj.rows)
        _cpu.moe_stage(
            o_proj.handle,
            self.router.handle,
            self.experts.handle,
            self.choose.top_k,
            self.choose.renormalize,
            0 if self.o_bias is None else self.o_bias.data_ptr(),
            self.norm.data_ptr(),
            self.eps,
            attended.data_ptr(),
            hidden.data_ptr(),
            num_tokens,
            out.data_ptr(),
        )
        return out


def _check(tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.dtype is not torch.float32 or tensor.shape != shape or not tensor.is_contiguous():
        name = str(tensor.dtype).removeprefix("torch.")
        raise ValueError(f"contiguous float32 {list(shape)} is needed, not {name} {list(tensor.shape)}")
