"""What GGUF's blocks of integers mean. Source: dequantize_row_q8_0, _q4_0 and _q4_1 in ggml's ggml-quants.c."""

from __future__ import annotations

import torch
from torch import Tensor

from moeflow.checkpoint.gguf.tensor_types import BLOCK_SIZES, TensorType


def widen_blocks(data: Tensor, kind: TensorType) -> Tensor:
    """Return the values of whole blocks, [bytes] uint8, as float32 [blocks * 32].

    `kind` is Q8_0, Q4_0 or Q4_1. A scale that is infinite or NaN makes its values so.
    """
    blocks = data.reshape(-1, BLOCK_SIZES[kind][1])
    scales = _float16(blocks[:, :2])
    if kind is TensorType.Q8_0:
        return (blocks[:, 2:].view(torch.int8) * scales).reshape(-1)
    if kind is TensorType.Q4_0:
        return ((_nibbles(blocks[:, 2:]) - 8.0) * scales).reshape(-1)
    assert kind is TensorType.Q4_1, "the header lets no other kind in"
    return (_nibbles(blocks[:, 4:]) * scales + _float16(blocks[:, 2:4])).reshape(-1)


def _float16(data: Tensor) -> Tensor:
    """Return one number of each row, [blocks, 2] uint8, as float32 [blocks, 1]."""
    return data.contiguous().view(torch.float16).float()


def _nibbles(data: Tensor) -> Tensor:
    """Return what lies in the lower halves of bytes, then in the upper: [blocks, 16] uint8 to float32 [blocks, 32]."""
    return torch.cat((data & 15, data >> 4), dim=1).float()
