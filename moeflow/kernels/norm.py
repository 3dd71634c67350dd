"""Normalisation of rows: by their root mean square, or as a layer norm does it.

By the root mean square it is written out in torch: `F.rms_norm` is no faster for one token on a CPU and ten times
slower for 512 (torch 2.13, 576 wide).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from moeflow.kernels.arrays import Array
from moeflow.kernels.cpu import row_ops
from moeflow.kernels.on_demand import on_demand, torch
from moeflow.kernels.triton import launching

if TYPE_CHECKING:
    from torch import Tensor

with on_demand(__name__):
    from moeflow.kernels.triton import norm as triton_norm


class NormWeights(msgspec.Struct, frozen=True):
    """How rows are normalised: `rms_norm`, or where it subtracts the mean `layer_norm`."""

    weight: Array  # [H]
    eps: float
    subtracts_mean: bool = False
    bias: Array | None = None  # [H], of a layer norm


class ExpertNorms(NamedTuple):
    """Weights and norms of a router, a shared expert and chosen ones that stand beside each other.

    Each gets the normalized input times its own weights, [H]. The experts' output is normalized before it is added.
    """

    router_weights: Array
    router_scale: float  # that the router's are multiplied by
    shared_weights: Array
    chosen_weights: Array
    shared: NormWeights
    chosen: NormWeights


class PostNorms(NamedTuple):
    """Norms of what a layer's parts return, before that is added to the hidden states."""

    attention: NormWeights
    feed_forward: NormWeights
    experts: ExpertNorms | None = None  # of experts next to a shared one; the sum goes into `feed_forward`
    scale: Array | None = None  # [1]: the factor of the layer's output; None: 1


def normalise(x: Array, norm: NormWeights) -> Array:
    """Return x normalised over the last dimension. Shapes: [..., H] -> the same."""
    if norm.subtracts_mean:
        return layer_norm(x, norm.weight, norm.bias, norm.eps)
    return rms_norm(x, norm.weight, norm.eps)


def add_norm(x: Array, residual: Array, norm: NormWeights) -> tuple[Array, Array]:
    """Return `x + residual`, and that normalised. Shapes: [..., H] all."""
    if launching.accepts(x):
        return triton_norm.add_norm(x, residual, norm.weight, norm.bias, norm.eps, subtracts_mean=norm.subtracts_mean)
    total = x + residual
    return total, normalise(total, norm)


def add_normalised(hidden: Array, x: Array, norm: NormWeights, factor: Array | None = None) -> Array:
    """Return `(hidden + normalise(x, norm)) * factor`.

    Shapes: hidden and x [T, H], factor [1]; None: 1 -> [T, H].
    """
    if launching.accepts(x):
        return triton_norm.normalise(
            x, norm.weight, norm.bias, norm.eps, subtracts_mean=norm.subtracts_mean, hidden=hidden, factor=factor
        )
    hidden = hidden + normalise(x, norm)
    return hidden if factor is None else hidden * factor


def add_normalised_norm(
    hidden: Tensor, x: Tensor, norm: NormWeights, next_norm: NormWeights, factor: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return what `add_normalised` does, and that normalised in the same way with other weights. Shapes: as there."""
    if not launching.accepts(x):
        out = add_normalised(hidden, x, norm, factor)
        return out, normalise(out, next_norm)
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out = triton_norm.normalise(
        x,
        norm.weight,
        norm.bias,
        norm.eps,
        subtracts_mean=norm.subtracts_mean,
        hidden=hidden,
        factor=factor,
        next_norm=next_norm,
        normed=normed,
    )
    return out, normed


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Return `x / sqrt(mean(x^2) + eps) * weight` over the last dimension, the mean taken in float32.

    Shapes: x [..., H], weight [H] -> [..., H] in x's dtype.
    """
    if row_ops.accepts(x):
        return row_ops.rms_norm(x, weight, eps)
    if launching.accepts(x):
        return triton_norm.rms_norm(x, weight, eps)
    wide = x.float()
    scale: Tensor = torch.linalg.vecdot(wide, wide).div_(x.shape[-1]).add_(eps).rsqrt_()
    return (wide * scale.unsqueeze(-1)).to(x.dtype).mul_(weight)


def layer_norm(x: Array, weight: Array, bias: Array | None, eps: float) -> Array:
    """Return `(x - mean(x)) / sqrt(var(x) + eps) * weight + bias` over the last dimension, computed in float32.

    Shapes: x [..., H], weight and bias [H] -> [..., H] in x's dtype.
    """
    if row_ops.accepts(x):
        return row_ops.layer_norm(x, weight, bias, eps)
    if launching.accepts(x):
        return triton_norm.layer_norm(x, weight, bias, eps)
    return torch.nn.functional.layer_norm(x, weight.shape, weight, bias, eps)
