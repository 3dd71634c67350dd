"""Times the layer of experts alone, beside torch's grouped products, and both forms for long passes."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from moeflow.kernels.experts import fused_experts
from moeflow.kernels.triton import experts, grouped_products
from moeflow.kernels.triton.launching import gpu_of
from studies.gpu_check.findings import Findings
from studies.gpu_check.resident.accuracy import by_torch, relative_error
from studies.gpu_check.resident.target import Target

LIMIT = 3.2e-2  # of the relative difference
LONG_TOKENS = 64  # from here on, each form for long passes is measured
COMPARED_TOKENS = 16  # of a long pass, with float64
NUM_CALLS = 4  # with different experts: few of them would stay in the cache


class _Shape(NamedTuple):
    name: str
    hidden: int
    width: int
    num_experts: int
    top_k: int


class _Layer(NamedTuple):
    x: Tensor
    gate_up: Tensor  # [E, 2I, H]
    down: Tensor  # [E, H, I]
    ids: Tensor
    weights: Tensor


def run(options: argparse.Namespace, findings: Findings) -> None:
    """Note microseconds of all, and the shares of the device's bandwidth and peak."""
    target = Target(options)
    shapes = [_Shape("30B-A3B", 2048, 768, 128, 8), _Shape("Mixtral", 4096, 14336, 8, 2)]
    counts: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
    if target.is_rehearsal:
        shapes, counts = [_Shape("tiny", 64, 32, 4, 2)], (1, 3)
    ceilings = target.ceilings()
    with torch.inference_mode():
        for shape in shapes:
            matrices = [_random(target, *size) for size in _sizes(shape)]
            for num_tokens in counts:
                layers = [_layer(target, shape, num_tokens, matrices) for _ in range(NUM_CALLS)]
                name = f"{shape.name}, {num_tokens} tokens"
                found = _time(target, layers, findings, name)
                if num_tokens >= LONG_TOKENS or target.is_rehearsal:
                    found |= _measure_forms(target, layers, findings, name)
                num_used = statistics.mean(len(set(layer.ids.flatten().tolist())) for layer in layers)
                weights = 3 * shape.hidden * shape.width
                bandwidth = 2 * num_used * weights / found["us"] * 1e6 / ceilings.read_bytes_per_s
                peak = 2.0 * num_tokens * shape.top_k * weights / found["us"] * 1e6 / ceilings.bf16_flops_per_s
                findings.note(**{name: found | {"bandwidth": round(bandwidth, 4), "peak": round(peak, 4)}})
                beside = f"torch {found['torch_us']:.1f} us, its products alone {found['torch_products_us']:.1f} us"
                findings.row(
                    name, f"{found['us']:.1f} us", f"{beside}; {bandwidth:.0%} of bandwidth, {peak:.0%} of peak"
                )


def _sizes(shape: _Shape) -> tuple[tuple[int, ...], ...]:
    return (shape.num_experts, 2 * shape.width, shape.hidden), (shape.num_experts, shape.hidden, shape.width)


def _random(target: Target, *size: int) -> Tensor:
    return torch.empty(size, dtype=torch.bfloat16, device=target.device).normal_(0, size[-1] ** -0.5)


def _layer(target: Target, shape: _Shape, num_tokens: int, matrices: list[Tensor]) -> _Layer:
    device = target.device
    ids = torch.rand(num_tokens, shape.num_experts, device=device).topk(shape.top_k).indices.contiguous()
    weights = torch.rand(num_tokens, shape.top_k, device=device)
    x = torch.randn(num_tokens, shape.hidden, device=device).bfloat16()
    return _Layer(x, matrices[0], matrices[1], ids, weights)


def _time(target: Target, layers: list[_Layer], findings: Findings, name: str) -> dict[str, float]:
    calls: dict[str, list[Callable[[], Any]]] = {
        "us": [partial(fused_experts, *layer) for layer in layers],
        "torch_us": [partial(_by_torch, layer) for layer in layers],
        "torch_products_us": [partial(_products, layer, *_sorted(layer, _order(layer))) for layer in layers],
    }
    with target.kernels():
        error = relative_error(fused_experts(*layers[0]), _by_torch(layers[0]))
        if not error <= LIMIT:
            findings.fault(f"{name}: differs from torch by {error:.1e}")
        times = {key: 1e6 * target.seconds_per_call(of_key) for key, of_key in calls.items()}
    return {key: round(value, 2) for key, value in times.items()} | {"difference": round(error, 5)}


def _measure_forms(target: Target, layers: list[_Layer], findings: Findings, name: str) -> dict[str, float]:
    """Return microseconds of the tiles and, where a pass may use it, of the grouped form; and errors from float64."""
    calls = [partial(fused_experts, *layer) for layer in layers]
    x, gate_up, down, ids, weights = layers[0]
    some = slice(COMPARED_TOKENS)
    with by_torch():
        wanted = fused_experts(x[some].double(), gate_up.double(), down.double(), ids[some], weights[some].double())
    capabilities = {"tiles": None, "grouped": grouped_products.CAPABILITY}
    if gpu_of(x).capability != grouped_products.CAPABILITY:
        del capabilities["grouped"]
    found = {}
    for form, capability in capabilities.items():
        with (
            target.kernels(),
            mock.patch.object(experts, "_MOST_SCANNED", 0),
            mock.patch.object(grouped_products, "CAPABILITY", capability),
        ):
            error = relative_error(calls[0]()[some], wanted)
            found[f"{form}_us"] = round(1e6 * target.seconds_per_call(calls), 2)
        found[f"{form}_error"] = round(error, 5)
        if not error <= LIMIT:
            findings.fault(f"{name}, {form}: differs from float64 by {error:.1e}")
        findings.row(f"{name}, {form}", f"{found[f'{form}_us']:.1f} us", f"error {error:.1e}")
    return found


def _order(layer: _Layer) -> Tensor:
    """Return the pairs in the order of experts."""
    return layer.ids.flatten().argsort(stable=True)


def _sorted(layer: _Layer, order: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of all pairs in their order, and where the rows of each expert end."""
    rows = layer.x.index_select(0, order // layer.ids.shape[1])
    counts = torch.histc(layer.ids.float(), bins=len(layer.down), min=0, max=len(layer.down) - 1)
    return rows, counts.cumsum(0).to(torch.int32)


def _products(layer: _Layer, rows: Tensor, offsets: Tensor) -> Tensor:
    """Return each pair's result, by two grouped products."""
    units = torch._grouped_mm(rows, layer.gate_up.transpose(1, 2), offs=offsets)
    gate, up = units.chunk(2, dim=1)
    return torch._grouped_mm(torch.nn.functional.silu(gate) * up, layer.down.transpose(1, 2), offs=offsets)


def _by_torch(layer: _Layer) -> Tensor:
    """Return the whole layer by torch: pairs are sorted, multiplied and summed on the device."""
    num_tokens, top_k = layer.ids.shape
    order = _order(layer)
    results = _products(layer, *_sorted(layer, order))
    pairs = torch.empty_like(results).index_copy_(0, order, results).view(num_tokens, top_k, -1)
    return (pairs.float() * layer.weights.unsqueeze(-1)).sum(1).to(layer.x.dtype)
