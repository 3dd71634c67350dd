"""Trained experts in one small file: the strongest components of their changes in int8, and routers in bf16.

The change of a matrix is a sum of components, each a column times a row. A singular value decomposition sorts them by
strength. The strongest of all matrices are kept, as many as the file may hold, and each has its own scales.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from moeflow.core.errors import CheckpointError, ConfigError
from moeflow.train.experts.adapters import MATRICES, Adapters, factor_names
from moeflow.train.experts.task import router_name

_FINGERPRINT: Final = "fingerprint"
_DIGEST: Final = "digest"
_PACKED: Final = ("counts", "a", "a.scales", "b", "b.scales")  # of a matrix
_REMEDY: Final = "Install moeflow again"
_LEVELS: Final = 127
_SCALE_BYTES: Final = 8  # of a component: two float32
_HEADER_BYTES: Final = 512  # of a matrix, for its names in the file's header


@dataclass(frozen=True, slots=True)
class TrainedExperts:
    """All that differs from the dense model."""

    adapters: Adapters
    routers: list[Tensor]  # [E, H] of each layer


@dataclass(frozen=True, slots=True)
class _Components:
    """The components of one matrix of one expert, the strongest first. Shapes: [C, in], [C, out], [C]."""

    inputs: Tensor
    outputs: Tensor
    strengths: Tensor


def save_experts(file: Path, fingerprint: str, experts: TrainedExperts, max_bytes: int) -> None:
    """Write the strongest components within `max_bytes`. Raises: ConfigError if not one fits; OSError."""
    layers = range(len(experts.routers))
    found = {
        (layer, matrix): [_decomposed(*pair) for pair in zip(*experts.adapters.of(layer, matrix), strict=True)]
        for layer in layers
        for matrix in MATRICES
    }
    tensors = {router_name(layer): router.to(torch.bfloat16) for layer, router in enumerate(experts.routers)}
    weakest = _weakest(list(found.values()), max_bytes - sum(tensor.nbytes for tensor in tensors.values()))
    for (layer, matrix), of_experts in found.items():
        tensors |= _packed(f"layers.{layer}.{matrix}", of_experts, weakest)
    save_file(tensors, file, {_FINGERPRINT: fingerprint, _DIGEST: _digest(tensors)})


def load_experts(file: Path, fingerprint: str) -> TrainedExperts | None:
    """Return the experts of this fingerprint; None if the file has others, or does not exist.

    Raises: CheckpointError if the file is damaged.
    """
    if not file.exists():
        return None
    try:
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata() or {}
            if metadata.get(_FINGERPRINT) != fingerprint:
                return None
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"cannot be read ({error})", file=file, remedy=_REMEDY) from error
    if metadata.get(_DIGEST) != _digest(tensors):
        raise CheckpointError("holds other bytes than its digest names", file=file, remedy=_REMEDY)
    layers = range(_num_layers(tensors))
    factors: dict[str, Tensor] = {}
    for layer in layers:
        for matrix in MATRICES:
            a, b = factor_names(layer, matrix)
            factors[a], factors[b] = _unpacked(f"layers.{layer}.{matrix}", tensors)
    return TrainedExperts(Adapters(factors), [tensors[router_name(layer)] for layer in layers])


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a hash of the values: routers first, then the matrices of each layer."""
    layers = range(_num_layers(tensors))
    prefixes = [f"layers.{layer}.{matrix}" for layer in layers for matrix in MATRICES]
    names = [*map(router_name, layers), *(f"{prefix}.{part}" for prefix in prefixes for part in _PACKED)]
    digest = hashlib.sha256()
    for name in names:
        if name in tensors:
            digest.update(tensors[name].contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _num_layers(tensors: Mapping[str, Tensor]) -> int:
    return sum(name.endswith(".router") for name in tensors)


def _decomposed(a: Tensor, b: Tensor) -> _Components:
    """Return the components of A B. Shapes: a [in, r], b [r, out]."""
    left, of_a = torch.linalg.qr(a.double())
    right, of_b = torch.linalg.qr(b.double().T)
    inner_left, strengths, inner_right = torch.linalg.svd(of_a @ of_b.T)
    return _Components((left @ inner_left).T, (right @ inner_right.T).T, strengths)


def _weakest(found: Sequence[list[_Components]], max_bytes: int) -> float:
    """Return the strength of the weakest component to keep."""
    each = [one for of_experts in found for one in of_experts]
    strengths = torch.cat([one.strengths for one in each])
    sizes = torch.cat(
        [torch.full_like(one.strengths, one.inputs.shape[1] + one.outputs.shape[1] + _SCALE_BYTES) for one in each]
    )
    order = strengths.argsort(descending=True)
    fits = sizes[order].cumsum(0) <= max_bytes - _HEADER_BYTES * len(found)
    if not fits.any():
        raise ConfigError(f"{max_bytes} bytes hold no component of the experts: allow more")
    return float(strengths[order][fits][-1])


def _packed(name: str, of_experts: list[_Components], weakest: float) -> dict[str, Tensor]:
    """Return the components of one matrix, those of all experts one after another."""
    kept = [each.strengths >= max(weakest, 1e-12) for each in of_experts]
    roots = torch.cat([each.strengths[keep].sqrt() for each, keep in zip(of_experts, kept, strict=True)])[:, None]
    parts = {
        "a": torch.cat([each.inputs[keep] for each, keep in zip(of_experts, kept, strict=True)]) * roots,
        "b": torch.cat([each.outputs[keep] for each, keep in zip(of_experts, kept, strict=True)]) * roots,
    }
    tensors = {f"{name}.counts": torch.tensor([int(keep.sum()) for keep in kept], dtype=torch.int32)}
    for side, values in parts.items():
        scales = values.abs().amax(dim=1, keepdim=True) / _LEVELS
        tensors[f"{name}.{side}"] = (values / scales).round().to(torch.int8)
        tensors[f"{name}.{side}.scales"] = scales[:, 0].float()
    return tensors


def _unpacked(name: str, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return A and B; experts with fewer components have zeros. Shapes: -> [E, in, r], [E, r, out]."""
    counts = tensors[f"{name}.counts"].tolist()
    a, b = (_padded(tensors[f"{name}.{side}"], tensors[f"{name}.{side}.scales"], counts) for side in ("a", "b"))
    return a.transpose(1, 2), b


def _padded(values: Tensor, scales: Tensor, counts: list[int]) -> Tensor:
    """Return each expert's components, with zeros up to the largest number. Shapes: -> [E, r, n]."""
    return pad_sequence(list(torch.split(values.float() * scales[:, None], counts)), batch_first=True)
