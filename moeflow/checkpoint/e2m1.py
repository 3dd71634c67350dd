"""Floats of four bits (e2m1), the numbers of MXFP4 and NVFP4: a sign, two bits of exponent, one of mantissa."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from moeflow.kernels.on_demand import torch

if TYPE_CHECKING:
    from torch import Tensor

_WITHOUT_SIGN: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_LEVELS: Final = (*_WITHOUT_SIGN, *(-it for it in _WITHOUT_SIGN))


def e2m1_values(codes: Tensor) -> Tensor:
    """Return what four bits stand for. Shapes: codes [...] uint8, below 16 -> [...] float32."""
    return torch.tensor(_LEVELS)[codes.int()]
