"""Weights that are NaN or infinite, which make every result NaN: found where they are read, and named.

Floats are compared as integers: NaN and infinity are the numbers whose exponent bits are all set. Of blocks the scales
are looked at. MXFP4 has none that are not finite, and readers of 8-bit floats refuse NaN themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.core.errors import CheckpointError
from moeflow.core.units import MIB
from moeflow.kernels.arrays import dtype_name
from moeflow.kernels.cpu.latent_weights import PackedUpProjection
from moeflow.kernels.cpu.packed_weight import PackedRows
from moeflow.kernels.on_demand import torch
from moeflow.kernels.triton.planar_rows import PlanarRows
from moeflow.kernels.weight_format import BlockKind
from moeflow.models.layers.rearranged import Rearranged

if TYPE_CHECKING:
    from moeflow.models.language_model import LanguageModel

_STRIDE: Final = 1 << 18  # numbers that are compared at once, so that they stay in a core's cache
_READ_BYTES: Final = 32 * MIB
_SMALL_BYTES: Final = MIB  # of norms, biases and scales
_FLOAT16: Final = 0x7C00  # exponent bits
_BFLOAT16: Final = 0x7F80  # also of the upper half of a float32
_EXPONENTS: Final[Mapping[str, tuple[Any, int]]] = {  # integers of a float's size, and its exponent bits
    "float32": (np.uint32, 0x7F800000),
    "float16": (np.uint16, _FLOAT16),
    "bfloat16": (np.uint16, _BFLOAT16),
}


class _Scales(NamedTuple):
    """Where the floats of a block lie, which are 16 bits each."""

    block_bytes: int
    first_byte: int
    num_floats: int = 1
    exponent: int = _FLOAT16


_SCALES: Final[Mapping[BlockKind, _Scales]] = {  # as csrc/*source_types.h read them
    "Q8_0": _Scales(34, 0),
    "Q4_0": _Scales(18, 0),
    "Q4_1": _Scales(20, 0, 2),
    "Q5_0": _Scales(22, 0),
    "Q5_1": _Scales(24, 0, 2),
    "Q2_K": _Scales(84, 80, 2),
    "Q3_K": _Scales(110, 108),
    "Q4_K": _Scales(144, 0, 2),
    "Q5_K": _Scales(176, 0, 2),
    "Q6_K": _Scales(210, 208),
    "IQ4_NL": _Scales(18, 0),
    "IQ4_XS": _Scales(136, 0),
    "LEVELS_IQ2": _Scales(146, 0),
    "LEVELS_IQ3_XXS": _Scales(138, 0),
    "LEVELS_IQ3_S": _Scales(138, 0),
    "F8_E4M3": _Scales(132, 2, exponent=_BFLOAT16),
    "NVFP4": _Scales(22, 2, exponent=_BFLOAT16),
}
_GROUP_BYTES: Final[Mapping[BlockKind, int]] = {"INT4_G128": 132, "INT4_G64": 68, "INT4_G32": 36, "INT8_G128": 132}
_IS_BFLOAT16: Final = 0x8000  # in a group's zero point: of what type its scale is


def check_finite(values: Any, name: str, checkpoint: Checkpoint, kind: BlockKind | None = None) -> None:
    """Raise CheckpointError, naming the tensor, if some of its floats, or scales of its blocks, are not finite."""
    if not is_finite(values, kind):
        raise CheckpointError(
            "holds NaN or infinite numbers",
            file=checkpoint.tensors[name].file,
            tensor=name,
            remedy="Download or convert the model again; `moeflow doctor MODEL --verify` lists all such tensors",
        )


def check_small_weights(model: LanguageModel, checkpoint: Checkpoint) -> None:
    """Do the same for norms, biases and scales of a model whose memory was filled before."""
    for name, weight in model.named_weights():
        if isinstance(weight, PackedRows | PackedUpProjection | PlanarRows | Rearranged):
            continue
        if weight.nbytes <= _SMALL_BYTES:
            check_finite(weight, name, checkpoint)


def find_not_finite(checkpoint: Checkpoint, names: Collection[str], on_bytes: Callable[[int, int], None]) -> list[str]:
    """Return which of some tensors hold numbers that are not finite; all are read. Raises: CheckpointError."""
    bytes_total = sum(checkpoint.tensors[name].num_bytes for name in names)
    bytes_done, found = 0, []
    for name in names:
        if not all(is_finite(values, kind) for values, kind in _pieces(checkpoint, name)):
            found.append(name)
        bytes_done += checkpoint.tensors[name].num_bytes
        on_bytes(bytes_done, bytes_total)
    return found


def _pieces(checkpoint: Checkpoint, name: str) -> Iterator[tuple[Any, BlockKind | None]]:
    info = checkpoint.tensors[name]
    if len(info.shape) != 2:
        yield checkpoint.read(name), None
        return
    num_rows = info.shape[0]
    step = max(_READ_BYTES * num_rows // max(info.num_bytes, 1), 1)
    for start in range(0, num_rows, step):
        stored = checkpoint.read_rows(name, start, min(start + step, num_rows))
        yield stored.values, stored.block_kind


def is_finite(values: Any, kind: BlockKind | None = None) -> bool:
    """Return whether floats, or with a `kind` the scales of blocks [n, bytes of a row] uint8, are finite numbers."""
    if kind is None:
        return _are_finite(values, dtype_name(values.dtype))
    blocks = np.ascontiguousarray(values if isinstance(values, np.ndarray) else values.numpy())
    if kind in _GROUP_BYTES:
        scales, zeros = _heads(blocks, _Scales(_GROUP_BYTES[kind], 0, 2)).T
        exponents = np.where(zeros & _IS_BFLOAT16, _BFLOAT16, _FLOAT16)
        return bool(((scales & exponents) < exponents).all())
    place = _SCALES.get(kind)
    return place is None or bool(((_heads(blocks, place) & place.exponent) < place.exponent).all())


def _heads(blocks: NDArray[np.uint8], place: _Scales) -> NDArray[np.uint16]:
    """Return the floats of each block as they lie there: [blocks, count]."""
    first = place.first_byte // 2
    return blocks.view(np.uint16).reshape(-1, place.block_bytes // 2)[:, first : first + place.num_floats]


def _are_finite(values: Any, dtype: str) -> bool:
    bits, exponent = _EXPONENTS[dtype]
    if not isinstance(values, np.ndarray):
        values = values.detach().view(torch.int32 if bits is np.uint32 else torch.int16).numpy()
    flat = np.ascontiguousarray(values).reshape(-1).view(bits)
    return all(
        int((flat[start : start + _STRIDE] & exponent).max()) < exponent for start in range(0, len(flat), _STRIDE)
    )
