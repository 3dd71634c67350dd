"""Kernels of the expert layer and of quantized matrices, as they are compiled for Qwen3-30B-A3B and Mixtral."""

from __future__ import annotations

from typing import NamedTuple

import torch

from moeflow.kernels.triton import experts
from moeflow.kernels.triton.planar_weights import PlanarWeights
from moeflow.kernels.triton.quantized_linear import quantized_linear
from tests.kernels.triton.recorded_cases import recorded


class Shape(NamedTuple):
    num_experts: int
    top_k: int
    hidden: int
    width: int


A3B, MIXTRAL = Shape(128, 8, 2048, 768), Shape(8, 2, 4096, 14336)


def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def weights(weight_format: str, *shape: int) -> torch.Tensor | PlanarWeights:
    *rows, size = shape
    scales = empty(*rows, size // 32, dtype=torch.float16)
    if weight_format == "int8":
        return PlanarWeights(empty(*shape, dtype=torch.int8), scales)
    if weight_format == "int4":
        return PlanarWeights(empty(*rows, size // 8, dtype=torch.int32), scales)
    return empty(*shape, dtype=getattr(torch, weight_format))


def layer(shape: Shape, num_tokens: int, weight_format: str, capability: int) -> list:
    num_experts, top_k, hidden, width = shape
    dtype = torch.bfloat16 if capability >= 80 else torch.float16
    gate_up = weights(weight_format, num_experts, 2 * width, hidden)
    down = weights(weight_format, num_experts, hidden, width)
    x, ids = empty(num_tokens, hidden, dtype=dtype), empty(num_tokens, top_k, dtype=torch.int64)
    chosen = empty(num_tokens, top_k, dtype=torch.float32)
    name = f"{weight_format}, {num_tokens} tokens of width {width}"
    return recorded(name, lambda: experts.fused_experts(x, gate_up, down, ids, chosen, residual=x), capability)


def matrix(shape: Shape, num_tokens: int, weight_format: str, capability: int) -> list:
    dtype = torch.bfloat16 if capability >= 80 else torch.float16
    weight = weights(weight_format, 1, shape.hidden, 2 * shape.hidden)
    x, residual = (empty(num_tokens, size, dtype=dtype) for size in (2 * shape.hidden, shape.hidden))
    name = f"{weight_format} matrix, {num_tokens} tokens"
    return recorded(name, lambda: quantized_linear(x, weight, residual=residual), capability)


def products(cases: list) -> list:
    return [case for case in cases if case.has_dot or "pair_kernel" in case.name]


CASES = [
    *layer(A3B, 4096, "bfloat16", 90),
    *(
        case
        for capability in (80, 89, 90)
        for weight_format in ("bfloat16", "int8", "int4")
        for num_tokens in (1, 16, 4096)
        for case in products(layer(A3B, num_tokens, weight_format, capability))
    ),
    *(
        case
        for weight_format in ("bfloat16", "int4")
        for num_tokens in (1, 16, 4096)
        for case in products(layer(MIXTRAL, num_tokens, weight_format, 90))
    ),
    *(case for weight_format in ("float16", "int8", "int4") for case in layer(A3B, 1, weight_format, 75)),
    *(
        case
        for capability in (80, 89, 90)
        for num_tokens in (1, 16, 512)
        for case in matrix(A3B, num_tokens, "int4", capability)
    ),
    *matrix(A3B, 1, "int4", 75),
]
