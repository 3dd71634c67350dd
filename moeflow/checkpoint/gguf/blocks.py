"""What the blocks of quantized tensors mean, where they are not computed with as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moeflow.checkpoint.gguf.tensor_types import BLOCK_SIZES, TensorType
from moeflow.kernels.on_demand import torch

if TYPE_CHECKING:
    from torch import Tensor


def widen_blocks(data: Tensor, kind: TensorType) -> Tensor:
    """Return the values of whole blocks, [bytes] uint8, as float32 [blocks * values of a block].

    A scale that is infinite or NaN makes its values so.
    """
    # Here, since the gguf package takes time to import for what else it does, and few starts need it.
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    blocks = data.numpy().reshape(-1, BLOCK_SIZES[kind][1])
    with np.errstate(all="ignore"):  # a scale of infinity is the model's own business
        return torch.from_numpy(dequantize(blocks, GGMLQuantizationType(kind))).reshape(-1)
