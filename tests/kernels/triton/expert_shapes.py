"""Kernels of the expert layer and of quantized matrices, as wrappers start them for known models."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from moeflow.kernels.norm import NormWeights
from moeflow.kernels.triton import experts
from moeflow.kernels.triton.planar_rows import empty_planar
from moeflow.kernels.triton.planar_weights import PlanarWeights
from moeflow.kernels.triton.quantized_linear import quantized_linear, wide_linear
from moeflow.kernels.weight_format import PLANAR_BITS, WeightFormat
from tests.kernels.triton.recorded_cases import recorded


class Shape(NamedTuple):
    num_experts: int
    top_k: int
    hidden: int
    width: int


A3B, MIXTRAL = Shape(128, 8, 2048, 768), Shape(8, 2, 4096, 14336)


def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def weights(weight_format: WeightFormat, *shape: int) -> torch.Tensor | PlanarWeights:
    count, rows, columns = shape
    if weight_format in PLANAR_BITS:
        return empty_planar(weight_format, (count, rows, columns), torch.device("meta"))
    return empty(*shape, dtype=getattr(torch, weight_format))


def layer(shape: Shape, num_tokens: int, weight_format: WeightFormat, capability: int) -> list:
    num_experts, top_k, hidden, width = shape
    dtype = torch.float32 if weight_format == "float32" else torch.bfloat16 if capability >= 80 else torch.float16
    gate_up = weights(weight_format, num_experts, 2 * width, hidden)
    down = weights(weight_format, num_experts, hidden, width)
    x, ids = empty(num_tokens, hidden, dtype=dtype), empty(num_tokens, top_k, dtype=torch.int64)
    chosen = empty(num_tokens, top_k, dtype=torch.float32)
    name = f"{weight_format}, {num_tokens} tokens of width {width}"
    return recorded(name, lambda: experts.fused_experts(x, gate_up, down, ids, chosen, residual=x), capability)


def normed_sum(hidden: int, top_k: int, capability: int) -> list:
    """Return the case of the sum of a token's experts, and its norm."""
    dtype = torch.bfloat16 if capability >= 80 else torch.float16
    matrices = (empty(16, 64, hidden, dtype=dtype), empty(16, hidden, 32, dtype=dtype))
    x, ids = empty(1, hidden, dtype=dtype), empty(1, top_k, dtype=torch.int64)
    norm = NormWeights(empty(hidden, dtype=dtype), 1e-6)
    call = partial(
        experts.fused_experts_norm,
        *(x, matrices, ids, empty(1, top_k, dtype=torch.float32)),
        **{"function": "silu", "biases": None, "residual": x, "norm": norm},
    )
    return [case for case in recorded(f"norm of {hidden}", call, capability) if "sum_kernel" in case.name]


def matrix(shape: Shape, num_tokens: int, weight_format: WeightFormat, capability: int) -> list:
    dtype = torch.bfloat16 if capability >= 80 else torch.float16
    weight = weights(weight_format, 1, shape.hidden, 2 * shape.hidden)
    x, residual = (empty(num_tokens, size, dtype=dtype) for size in (2 * shape.hidden, shape.hidden))
    name = f"{weight_format} matrix, {num_tokens} tokens"
    return recorded(name, lambda: quantized_linear(x, weight, residual=residual), capability)


def router(shape: Shape, num_tokens: int, capability: int) -> list:
    dtype = torch.bfloat16 if capability >= 80 else torch.float16
    x, weight = (
        empty(num_tokens, shape.hidden, dtype=dtype),
        empty(shape.num_experts, shape.hidden, dtype=torch.float32),
    )
    return recorded(f"float32 router, {num_tokens} tokens", lambda: wide_linear(x, weight), capability)


def products(cases: list) -> list:
    """Return the cases that depend on the format of weights."""
    return [case for case in cases if "sum_kernel" not in case.name and "sort_kernel" not in case.name]
