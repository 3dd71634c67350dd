"""Networks whose matrices lie one below the other in one tensor: gate rows before up rows, expert after expert."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from moeflow.checkpoint.checkpoint import TensorInfo
from moeflow.checkpoint.file_errors import check_num_tensors
from moeflow.checkpoint.renamed.renamed_checkpoint import TensorPiece
from moeflow.core.errors import CheckpointError

_STACK: Final = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)")
PARTS: Final = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def find_experts(name: str, info: TensorInfo, known: str) -> Mapping[str, TensorPiece]:
    """Return what a stack `gate_up_proj` [E, 2 width, hidden] or `down_proj` [E, hidden, width] holds; else nothing.

    `known` is its name in a text-only model.

    Raises: CheckpointError if it has another shape.
    """
    found = _STACK.fullmatch(known)
    if found is None:
        return {}
    parts = PARTS[found[2]]
    check_stack(name, info, 3, len(parts))
    check_num_tensors(info.shape[0] * len(parts), info.file)
    return dict(cut_rows([f"{found[1]}.{expert}" for expert in range(info.shape[0])], parts, name, info))


def cut_rows(
    prefixes: Sequence[str], parts: Sequence[str], name: str, info: TensorInfo
) -> Iterator[tuple[str, TensorPiece]]:
    """Yield the matrices of networks that lie one below the other, as many in each as there are `parts`."""
    rows, cols = info.shape[-2] // len(parts), info.shape[-1]
    places = [f"{prefix}.{part}.weight" for prefix in prefixes for part in parts]
    for number, place in enumerate(places):
        yield place, TensorPiece(name, (rows, cols), number * rows)


def check_stack(name: str, info: TensorInfo, num_dims: int, num_parts: int) -> None:
    """Raise CheckpointError unless a tensor has so many dimensions, and rows of as many equal parts."""
    if len(info.shape) != num_dims or info.shape[-2] % num_parts:
        raise misfit(name, info, f"{num_dims} dimensions with {num_parts} equal parts")


def misfit(name: str, info: TensorInfo, expected: str) -> CheckpointError:
    """Make the error for a tensor of another shape than `expected`."""
    return CheckpointError(
        f"has the shape {list(info.shape)}, where {expected} are expected",
        file=info.file,
        tensor=name,
        remedy="Check that config.json belongs to these weights, or download the model again",
    )
