"""gpt-oss: experts are stacked, gates and ups taking turns, with biases; unquantized matrices are turned.

    experts.gate_up_proj       [E, hidden, 2 width]     gate 0, up 0, gate 1, up 1, ...
    experts.gate_up_proj_bias  [E, 2 width]             likewise
    experts.down_proj          [E, width, hidden]
    experts.down_proj_bias     [E, hidden]

Matrices in MXFP4 have their names already (`checkpoint/quantized/mxfp4.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from moeflow.checkpoint.checkpoint import Checkpoint, TensorInfo
from moeflow.checkpoint.file_errors import check_num_tensors
from moeflow.checkpoint.renamed.renamed_checkpoint import TensorPiece
from moeflow.checkpoint.renamed.stacks import PARTS, misfit

_STACK: Final = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)(_bias)?")


def find_pieces(stored: Checkpoint) -> dict[str, TensorPiece]:
    """Return what each tensor is in the files. Raises: CheckpointError if stacks have other shapes."""
    pieces: dict[str, TensorPiece] = {}
    for name, info in stored.tensors.items():
        found = _STACK.fullmatch(name)
        if found is None:
            pieces[name] = TensorPiece(name, info.shape)
        else:
            prefix, parts, is_bias = found[1], PARTS[found[2]], bool(found[3])
            num_dims = 2 if is_bias else 3
            if len(info.shape) != num_dims or info.shape[-1] % len(parts):
                raise misfit(name, info, f"{num_dims} dimensions with a last one of {len(parts)} parts")
            check_num_tensors(len(pieces) + info.shape[0] * len(parts), stored.path)
            pieces |= dict(_experts(prefix, parts, name, info, is_bias=is_bias))
        check_num_tensors(len(pieces), stored.path)
    return pieces


def _experts(
    prefix: str, parts: tuple[str, ...], name: str, info: TensorInfo, *, is_bias: bool
) -> Iterator[tuple[str, TensorPiece]]:
    step = len(parts)
    for expert in range(info.shape[0]):
        for first, part in enumerate(parts):
            rows = info.shape[-1] // step
            own = f"{prefix}.{expert}.{part}"
            if is_bias:
                yield f"{own}.bias", TensorPiece(name, (rows,), expert, first=first, step=step)
            else:
                cols = info.shape[1]
                yield f"{own}.weight", TensorPiece(name, (rows, cols), expert * cols, True, first, step)
