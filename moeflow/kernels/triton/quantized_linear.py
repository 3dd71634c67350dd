"""Products with one matrix that is planar, or more precise than its inputs. The reference is `kernels/linear.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from moeflow.kernels.on_demand import torch
from moeflow.kernels.triton.matrix_products import Matrices
from moeflow.kernels.triton.planar_weights import PlanarWeights

if TYPE_CHECKING:
    from torch import Tensor

_FEW_ROWS: Final = (
    4  # that are multiplied one by one: tensor cores take 16, and weights come from the cache after the first
)


def quantized_linear(
    x: Tensor, weight: PlanarWeights, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """Return `x @ weight.T + bias + residual`, summed in float32. Launches: 1.

    Shapes: x [T, K], weight one matrix [N, K], bias [N], residual [T, N] -> [T, N].
    """
    matrices = Matrices(
        weight, None if bias is None else bias.unsqueeze(0), None if residual is None else residual.contiguous()
    )
    out = torch.empty((len(x), matrices.num_outputs), dtype=x.dtype, device=x.device)
    rows = x.contiguous()
    if len(rows) <= _FEW_ROWS:
        matrices.by_pairs(rows, out, None, 1)
    else:
        matrices.by_rows(rows, out)
    return out


def wide_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `x @ weight.T + bias` in float32, without a launch that converts x: for routers. Launches: 1.

    Shapes: x [T, K] of 16 bits, weight [N, K] float32, bias [N] float32 -> [T, N].
    """
    out = torch.empty((len(x), len(weight)), dtype=weight.dtype, device=x.device)
    Matrices(weight.unsqueeze(0), None if bias is None else bias.unsqueeze(0)).by_pairs(x.contiguous(), out, None, 1)
    return out
