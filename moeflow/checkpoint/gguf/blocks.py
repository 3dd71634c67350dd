"""What the gguf package knows of quantized tensors that are not computed with as they are: values of blocks, and grids.

It is imported inside functions, since that takes time for what else it does, and few starts need it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from moeflow.checkpoint.gguf.tensor_types import BLOCK_SIZES, TensorType
from moeflow.kernels.on_demand import torch

if TYPE_CHECKING:
    from torch import Tensor


def widen_blocks(data: Tensor, kind: TensorType) -> Tensor:
    """Return the values of whole blocks, [bytes] uint8, as float32 [blocks * values of a block].

    A scale that is infinite or NaN makes its values so.
    """
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    blocks = data.numpy().reshape(-1, BLOCK_SIZES[kind][1])
    with np.errstate(all="ignore"):  # a scale of infinity is the model's own business
        return torch.from_numpy(dequantize(blocks, GGMLQuantizationType(kind))).reshape(-1)


def grid_values(kind: TensorType) -> NDArray[np.float32]:
    """Return what the places of a type's grid stand for, [places, values of one]."""
    from gguf import quants

    reader = getattr(quants, kind.name)
    reader.init_grid()
    values: NDArray[np.float32] = reader.grid[0, 0]
    return values
