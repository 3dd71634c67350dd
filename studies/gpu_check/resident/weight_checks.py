"""Checks of kernels that read weights: experts in each of their forms, and products with planar matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from moeflow.kernels.expert_biases import ExpertBiases
from moeflow.kernels.experts import fused_experts, fused_experts_norm
from moeflow.kernels.linear import linear
from moeflow.kernels.norm import ExpertNorms, NormWeights, PostNorms
from moeflow.kernels.normed_experts import expert_inputs, normed_experts
from moeflow.kernels.triton.planar_rows import empty_planar
from moeflow.kernels.triton.planar_weights import HEAD_WORDS, SUPERBLOCK_FORMATS, MadeFormat, PlanarWeights, pack
from moeflow.kernels.weight_format import WeightFormat
from studies.gpu_check.resident.accuracy import Accuracy, Widen

_FORMATS: tuple[MadeFormat, ...] = ("int8", "int4")
_OF_FILES: tuple[WeightFormat, ...] = ("mxfp4", "fp8", "int4-g128", "int8-g128", "q4_k", "q5_k", "q6_k")
_SCALE: Final = 2.0**-8  # of values in blocks


class _Experts(NamedTuple):
    gate_up: Tensor
    down: Tensor
    biases: ExpertBiases
    packed: dict[MadeFormat, tuple[PlanarWeights, PlanarWeights]]


def check_experts(accuracy: Accuracy) -> None:
    """Compare the sum of chosen experts, of few tokens and of many, in floats and integers."""
    is_small = accuracy.target.is_rehearsal
    num_experts, top_k, hidden, width = (4, 2, 64, 32) if is_small else (32, 4, 2048, 768)
    gate_up = accuracy.draw(num_experts, 2 * width, hidden, scale=hidden**-0.5)
    down = accuracy.draw(num_experts, hidden, width, scale=width**-0.5)
    biases = ExpertBiases(accuracy.draw(num_experts, 2 * width), accuracy.draw(num_experts, hidden))
    packed = {name: (pack(gate_up, name), pack(down, name)) for name in _FORMATS}
    for num_tokens in (1, 3) if is_small else (1, 6, 64, 300):
        _check_experts(accuracy, _Experts(gate_up, down, biases, packed), num_tokens, top_k)


def _check_experts(accuracy: Accuracy, experts: _Experts, num_tokens: int, top_k: int) -> None:
    num_experts, hidden, _ = experts.down.shape
    x, residual = (accuracy.draw(num_tokens, hidden) for _ in range(2))
    ids = torch.stack([accuracy.permutation(num_experts)[:top_k] for _ in range(num_tokens)])
    weights, norm = torch.rand(num_tokens, top_k, device=x.device), accuracy.draw(hidden)

    def plain(widen: Widen) -> Sequence[Tensor]:
        gate_up, down = widen(experts.gate_up), widen(experts.down)
        return [fused_experts(widen(x), gate_up, down, ids, weights, residual=widen(residual))]

    def biased(widen: Widen) -> Sequence[Tensor]:
        gate_up, down = widen(experts.gate_up), widen(experts.down)
        biases = ExpertBiases(*map(widen, experts.biases))
        return [fused_experts(widen(x), gate_up, down, ids, weights, biases=biases)]

    def normed(widen: Widen) -> Sequence[Tensor]:
        matrices = (widen(experts.gate_up), widen(experts.down))
        return fused_experts_norm(
            widen(x),
            matrices,
            ids,
            weights,
            function="silu",
            biases=None,
            residual=widen(residual),
            norm=NormWeights(widen(norm), 1e-6),
        )

    def of_two_kinds(widen: Widen) -> Sequence[Tensor]:
        return _normed_experts(widen, experts, (x, residual, norm), torch.sort(ids).values, weights)

    def quantized(widen: Widen) -> Sequence[Tensor]:
        gate_up, down = (_of_dtype(it, widen(x)) for it in experts.packed[weight_format])
        return [fused_experts(widen(x), gate_up, down, ids, weights)]

    accuracy.check("experts", plain)
    accuracy.check("experts, biases", biased)
    accuracy.check("experts and norm", normed)
    accuracy.check("experts with norms", of_two_kinds)
    for weight_format in _FORMATS:
        accuracy.check(f"experts, {weight_format}", quantized)


def _normed_experts(
    widen: Widen, experts: _Experts, given: tuple[Tensor, Tensor, Tensor], ids: Tensor, weights: Tensor
) -> Sequence[Tensor]:
    """Compute with the last expert as a shared one, which has an input and a norm of its own."""
    x, hidden, norm = map(widen, given)
    near_one = norm / 8 + 1
    one = NormWeights(near_one, 1e-6)
    norms = PostNorms(one, one, ExpertNorms(norm, 0.5, near_one, norm, one, one), near_one[:1])
    hidden, inputs = expert_inputs(x, hidden, NormWeights(torch.ones_like(norm), 1e-6), norms)
    last = len(experts.down) - 1
    chosen = torch.cat([ids[:, :-1] % last, torch.full_like(ids[:, :1], last)], dim=1)
    matrices = (widen(experts.gate_up), widen(experts.down))
    out, normed = normed_experts(
        inputs[:2], matrices, (chosen, weights), 1, hidden, norms, function="gelu_tanh", next_norm=one
    )
    return [*inputs, out, normed]


def check_quantized(accuracy: Accuracy) -> None:
    """Compare products with integer matrices."""
    num_rows, num_columns = (40, 64) if accuracy.target.is_rehearsal else (5120, 2048)
    for weight_format in _FORMATS:
        weight = pack(accuracy.draw(1, num_rows, num_columns, scale=num_columns**-0.5), weight_format)
        for num_tokens in (1, 5) if accuracy.target.is_rehearsal else (1, 3, 16, 100):
            _check_product(accuracy, f"product, {weight_format}", weight, num_tokens)


def check_blocks(accuracy: Accuracy) -> None:
    """Compare products with random blocks of files."""
    num_rows, num_columns = (40, 256) if accuracy.target.is_rehearsal else (5120, 2048)
    for weight_format in _OF_FILES:
        weight = empty_planar(weight_format, (1, num_rows, num_columns), accuracy.target.device)
        _fill_values(accuracy, weight)
        _fill_scales(accuracy, weight)
        for num_tokens in (1, 5) if accuracy.target.is_rehearsal else (1, 16):
            _check_product(accuracy, f"product, {weight_format}", weight, num_tokens)


def _fill_values(accuracy: Accuracy, weight: PlanarWeights) -> None:
    """Draw all bits, except that no 8-bit float is NaN."""
    shape = (*weight.values.shape[:-1], weight.values.shape[-1] * weight.values.element_size())
    values = accuracy.bytes(*shape)
    weight.values.view(torch.uint8).copy_(values & 0xF7 if weight.format == "fp8" else values)


def _fill_scales(accuracy: Accuracy, weight: PlanarWeights) -> None:
    """Draw small scales, and all minima and zero points."""
    scales = weight.scales
    if scales.dtype == torch.float32:
        scales.fill_(_SCALE).mul_(accuracy.bytes(*scales.shape).float())
    elif scales.dtype == torch.uint8:  # exponents
        scales.copy_(accuracy.bytes(*scales.shape) % 8 + 117)
    else:
        head = int(torch.tensor([_SCALE], dtype=torch.float16).view(torch.int16).item())
        drawn = accuracy.bytes(*scales.shape, 4).view(torch.int32).squeeze(-1)
        if weight.format in SUPERBLOCK_FORMATS:
            drawn[..., ::HEAD_WORDS] = head << 16 | head
        else:
            drawn = (drawn & 0x7F) << 16 | head
        scales.copy_(drawn)


def _check_product(accuracy: Accuracy, name: str, weight: PlanarWeights, num_tokens: int) -> None:
    x, bias = accuracy.draw(num_tokens, weight.shape[2]), accuracy.draw(weight.shape[1])

    def run(widen: Widen) -> Sequence[Tensor]:
        given = _of_dtype(weight, widen(x))
        return [linear(widen(x), given[0] if isinstance(given, Tensor) else given, widen(bias))]

    accuracy.check(name, run)


def _of_dtype(packed: PlanarWeights, x: Tensor) -> PlanarWeights | Tensor:
    """Return matrices for inputs: their exact values for float64."""
    if x.dtype is not torch.float64:
        return packed
    return torch.stack([packed[number] for number in range(len(packed))]).double()
