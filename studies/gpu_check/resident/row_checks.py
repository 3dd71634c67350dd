"""Checks of kernels that compute each row by itself: norms, activations, rotary tables and routing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moeflow.kernels.activation import NONLINEARITIES, ClampedSwiglu, apply_and_mul
from moeflow.kernels.linear import norm_linear
from moeflow.kernels.norm import NormWeights, add_norm, add_normalised, add_normalised_norm, normalise
from moeflow.kernels.rotary import inverse_frequencies, rotary_table
from moeflow.kernels.routing import Routing
from studies.gpu_check.resident.accuracy import Accuracy, Widen, poisoned_memory

_POSITIONS = (0, 1, 4097, 1 << 20)


def check_rows(accuracy: Accuracy) -> None:
    """Check all of them."""
    sizes = (33,) if accuracy.target.is_rehearsal else (2048, 2880, 5120)
    for size in sizes:
        for subtracts_mean in (False, True):
            _check_norms(accuracy, size, subtracts_mean)
        _check_activations(accuracy, size)
    _check_norm_products(accuracy)
    _check_rotary_table(accuracy)
    for num_experts, routing in _routings(accuracy):
        _check_routing(accuracy, num_experts, routing)


def _check_norms(accuracy: Accuracy, size: int, subtracts_mean: bool) -> None:
    x, other = (accuracy.draw(2, size) for _ in range(2))
    weight, bias, factor = accuracy.draw(size), accuracy.draw(size), accuracy.draw(1)

    def weights(widen: Widen) -> NormWeights:
        return NormWeights(widen(weight), 1e-6, subtracts_mean, widen(bias) if subtracts_mean else None)

    def plain(widen: Widen) -> Sequence[Tensor]:
        return [normalise(widen(x), weights(widen))]

    def with_residual(widen: Widen) -> Sequence[Tensor]:
        return add_norm(widen(x), widen(other), weights(widen))

    def with_hidden(widen: Widen) -> Sequence[Tensor]:
        return [add_normalised(widen(other), widen(x), weights(widen), widen(factor))]

    def with_next(widen: Widen) -> Sequence[Tensor]:
        return add_normalised_norm(widen(other), widen(x), weights(widen), weights(widen), widen(factor))

    accuracy.check("norm", plain)
    accuracy.check("norm of a sum", with_residual)
    accuracy.check("norm, added", with_hidden)
    accuracy.check("norm, added, and the next", with_next)


def _check_norm_products(accuracy: Accuracy) -> None:
    size, num_outputs = (64, 40) if accuracy.target.is_rehearsal else (1536, 4096)
    norm, weight = accuracy.draw(size), accuracy.draw(num_outputs, size, scale=size**-0.5)
    for num_rows in (1, 3) if accuracy.target.is_rehearsal else (1, 20, 64):
        x = accuracy.draw(num_rows, size)

        def run(widen: Widen, x: Tensor = x) -> Sequence[Tensor]:
            return [norm_linear(widen(x), NormWeights(widen(norm), 1e-6), widen(weight))]

        accuracy.check("norm and product", run)


def _check_activations(accuracy: Accuracy, size: int) -> None:
    gate_up = accuracy.draw(2, 2 * size, scale=3.0)
    for function in (*NONLINEARITIES, ClampedSwiglu(1.702, 7.0)):
        accuracy.check("activation", lambda widen, it=function: [apply_and_mul(it, widen(gate_up))])  # type: ignore[misc]


def _check_rotary_table(accuracy: Accuracy) -> None:
    from moeflow.kernels.triton import rotary_table as by_triton

    device = accuracy.target.device
    for rotary_dim, scale in ((6, 1.0), (128, 1.3465735902799727)):
        positions, frequencies = torch.tensor(_POSITIONS), torch.from_numpy(inverse_frequencies(rotary_dim, 1e6))
        with accuracy.target.kernels(), poisoned_memory():
            found = by_triton.rotary_table(positions.to(device), frequencies.to(device), scale, accuracy.dtype)
        wanted = rotary_table(positions, frequencies, scale, torch.float32)
        accuracy.take("rotary table", [x.cpu() for x in found], wanted)


def _routings(accuracy: Accuracy) -> list[tuple[int, Routing]]:
    """Return numbers of experts, and how families choose among them."""
    bias = torch.randn(256, device=accuracy.target.device) * 0.1
    groups = Routing(
        8,
        score="sigmoid",
        choice_bias=bias,
        num_groups=8,
        num_chosen_groups=4,
        group_score="top2_sum",
        renormalize=True,
        epsilon=1e-20,
        scale=2.5,
    )
    few = [(128, Routing(8, renormalize=True)), (16, Routing(2, score="sparsemixer", jitter=0.2)), (256, groups)]
    gated = Routing(10, renormalize=True, num_shared=1, has_shared_gate=True)
    return [
        *few,
        (512, gated),
        (128, Routing(6, num_shared=2)),
        (64, Routing(8)),
        (160, Routing(6, num_groups=8, num_chosen_groups=3, scale=16.0)),
    ]


def _check_routing(accuracy: Accuracy, num_experts: int, routing: Routing) -> None:
    """Compare ids and weights of logits that are exact in every dtype and never equal."""
    rows = [accuracy.permutation(num_experts + routing.has_shared_gate) for _ in range(2)]
    logits = ((torch.stack(rows) - num_experts // 2) / 32).to(accuracy.dtype)
    accuracy.check("routing", lambda widen: routing(widen(logits)))
