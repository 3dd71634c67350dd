"""Matrix product with a weight, through the fastest path torch has for it.

For float32 on the CPU, torch's `F.linear` uses MKL. On AMD processors MKL is slower than oneDNN (Zen 5, [1..128, 576] x
[3072, 576]: 2.5 times). torch ships oneDNN as an operator for its compiler, which is used where it exists. For
bfloat16, torch uses oneDNN anyway.
A oneDNN call costs 10 us and each new shape once 0.5 ms, so small weights such as routers stay with `F.linear`.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from moeflow.kernels.arrays import Array
from moeflow.kernels.cpu import extension, stages
from moeflow.kernels.cpu.packed_weight import PackedStack, PackedWeight
from moeflow.kernels.norm import NormWeights, normalise
from moeflow.kernels.on_demand import on_demand, torch
from moeflow.kernels.triton import launching
from moeflow.kernels.triton.planar_stack import PlanarStack
from moeflow.kernels.triton.planar_weights import PlanarWeights

if TYPE_CHECKING:
    from torch import Tensor

with on_demand(__name__):
    from moeflow.kernels.triton import norm_linear as triton_norm_linear
    from moeflow.kernels.triton import quantized_linear as triton_linear

_SMALL_WEIGHT = 2**16  # values
_FEW_WIDE_ROWS = 16  # that meet a float32 weight one by one on a GPU: this spares a launch that converts them


def linear(
    x: Array,
    weight: Tensor | PackedWeight | PackedStack | PlanarWeights | PlanarStack,
    bias: Array | None = None,
    residual: Array | None = None,
) -> Array:
    """Return `x @ weight.T + bias + residual`.

    Shapes: x [T, H], weight [N, H], bias [N], residual [T, N] -> [T, N]; all of one dtype, float32 beside a packed
    weight. x alone may have another one than a tensor. `PlanarWeights` are one matrix.
    """
    if isinstance(weight, PackedWeight):
        return extension.linear(x, weight, bias, residual)
    if isinstance(weight, PackedStack | PlanarStack):
        out = torch.cat([linear(x, part) for part in weight.parts], dim=1)
        return _added(_added(out, bias), residual)
    if isinstance(weight, PlanarWeights):
        if len(x) and launching.accepts(x):
            return triton_linear.quantized_linear(x, weight, bias, residual)
        weight = weight[0].to(x.dtype)
    if x.dtype != weight.dtype:
        return _added(_wide_product(x, weight, bias), residual)
    return _added(_product(x, weight, bias), residual)


def norm_linear(
    x: Tensor,
    norm: NormWeights,
    weight: Tensor | PackedWeight | PackedStack | PlanarWeights | PlanarStack,
    bias: Tensor | None = None,
) -> Tensor:
    """Return `normalise(x, norm) @ weight.T + bias`. Shapes as in `linear`."""
    if isinstance(weight, PackedWeight):
        return stages.norm_linear(x, norm, weight, bias)
    if isinstance(weight, PackedStack):
        return _added(torch.cat([stages.norm_linear(x, norm, part) for part in weight.parts], dim=1), bias)
    if (
        not isinstance(weight, PlanarWeights | PlanarStack)
        and launching.accepts(x)
        and triton_norm_linear.takes(x, norm)
    ):
        return triton_norm_linear.norm_linear(x, norm, weight, bias)
    return linear(normalise(x, norm), weight, bias)


def _added(out: Tensor, more: Tensor | None) -> Tensor:
    return out if more is None else out.add_(more)


@functools.cache
def _has_onednn() -> bool:
    return hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _wide_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the product in the weight's type."""
    is_few = weight.dtype == torch.float32 and 0 < len(x) <= _FEW_WIDE_ROWS
    if is_few and launching.accepts(x):
        return triton_linear.wide_linear(x, weight, bias)
    return _product(x.to(weight.dtype), weight, bias)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if x.dtype == torch.float32 and x.device.type == "cpu" and weight.numel() > _SMALL_WEIGHT and _has_onednn():
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return y
    return torch.nn.functional.linear(x, weight, bias)
