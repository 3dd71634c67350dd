"""Root-mean-square normalisation.

In torch it is written out: `F.rms_norm` is no faster for one token on a CPU and ten times slower for 512 (torch 2.13,
576 wide).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moeflow.kernels.arrays import Array
from moeflow.kernels.cpu import row_ops
from moeflow.kernels.on_demand import torch

if TYPE_CHECKING:
    from torch import Tensor


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Return `x / sqrt(mean(x^2) + eps) * weight` over the last dimension, the mean taken in float32.

    Shapes: x [..., H], weight [H] -> [..., H] in x's dtype.
    """
    if row_ops.accepts(x):
        return row_ops.rms_norm(x, weight, eps)
    wide = x.float()
    scale: Tensor = torch.linalg.vecdot(wide, wide).div_(x.shape[-1]).add_(eps).rsqrt_()
    return (wide * scale.unsqueeze(-1)).to(x.dtype).mul_(weight)
