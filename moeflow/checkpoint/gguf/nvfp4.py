"""GGUF's NVFP4 as the blocks that kernels read, and the number that multiplies all scales of a matrix.

    a block in the file   4 scales, e4m3 without a sign | 4 x 8 bytes
    8 of these            have 16 values: byte j those of values j and j + 8

What all scales are multiplied by is a tensor beside `X.weight`, `X.scale`, of one float32 or one an expert; without it
1. `X.input_scale` is for activations that are rounded, which here stay finer. Source: llama.cpp's `_nvfp4_pack` and
`ggml_ue4m3_to_fp32`, to which the largest code is 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from moeflow.checkpoint.e2m1 import e2m1_values
from moeflow.checkpoint.gguf.header import GGUFTensor
from moeflow.checkpoint.gguf.tensor_types import BLOCK_SIZES, TensorType
from moeflow.kernels.on_demand import torch

if TYPE_CHECKING:
    from torch import Tensor

_, _BYTES = BLOCK_SIZES[TensorType.NVFP4]
_SCALES: Final = 4  # of a block
_SIGN, _NONE = 128, 127  # in a scale
_WEIGHT, _SCALE, _INPUT_SCALE = ".weight", ".scale", ".input_scale"


def factors_of(tensor: GGUFTensor, tensors: Mapping[str, GGUFTensor]) -> GGUFTensor | None:
    """Return the tensor with what an NVFP4 tensor's scales are multiplied by; None: there is none."""
    return tensors.get(tensor.name.removesuffix(_WEIGHT) + _SCALE)


def is_beside_nvfp4(name: str, tensors: Mapping[str, GGUFTensor]) -> bool:
    """Return whether a tensor is about the scales of another, which is NVFP4."""
    stem = name.removesuffix(_INPUT_SCALE).removesuffix(_SCALE)
    weight = tensors.get(stem + _WEIGHT) if stem != name else None
    return weight is not None and weight.quantization == TensorType.NVFP4


def nvfp4_blocks(data: Tensor, factor: Tensor) -> Tensor:
    """Return whole blocks as those of csrc/formats/group_source_types.h: factor, two scales, 16 bytes with neighbours.

    Shapes: data [bytes], factor [1] float32 -> [blocks * 2, bytes of one] uint8.
    """
    scales, pairs = _taken_apart(data)
    factors = factor.view(torch.uint8).expand(len(scales), 2, -1)
    parts = (factors, scales.view(-1, 2, 2), (pairs[..., 0::2] | pairs[..., 1::2] << 4).view(-1, 2, 16))
    return torch.cat(parts, dim=2).view(2 * len(scales), -1)


def nvfp4_values(data: Tensor, factor: Tensor) -> Tensor:
    """Return the values of whole blocks, [blocks * 64] float32."""
    scales, codes = _taken_apart(data)
    return (e2m1_values(codes) * (scales.view(torch.float8_e4m3fn).float() * factor)[..., None]).view(-1)


def _taken_apart(data: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales [blocks, 4] and codes [blocks, 4, 16], uint8."""
    blocks = data.view(-1, _BYTES)
    scales, pairs = blocks[:, :_SCALES] & (_SIGN - 1), blocks[:, _SCALES:].reshape(-1, _SCALES, 8)
    return scales.where(scales != _NONE, 0), torch.cat([pairs & 15, pairs >> 4], dim=2)
