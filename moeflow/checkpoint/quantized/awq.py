"""AWQ, packed as its gemm kernel takes it.

For a linear layer `X` of `in` inputs and `out` outputs:

    X.qweight   [in, out / 8] int32     eight outputs a word, four bits each, in the order 0, 2, 4, 6, 1, 3, 5, 7
    X.qzeros    [groups, out / 8] int32     likewise
    X.scales    [groups, out] float16 or bfloat16

A group is `group_size` inputs. A weight is (code - zero point) * scale. Source: `WQLinear_GEMM` of AutoAWQ.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from moeflow.checkpoint.quantized.integers import IntegerMatrix, Integers, unpack
from moeflow.checkpoint.quantized.matrix import Found
from moeflow.checkpoint.quantized.parts import TensorParts
from moeflow.checkpoint.quantized.settings import QuantizationSettings
from moeflow.kernels.on_demand import torch

if TYPE_CHECKING:
    from torch import Tensor

_BITS: Final = 4
_IN_WORD: Final = 32 // _BITS
_PLACES: Final = [0, 4, 1, 5, 2, 6, 3, 7]  # of output i in a word


def find_matrices(parts: TensorParts, settings: QuantizationSettings) -> Found:
    """Return the linear layers. Raises: CheckpointError."""
    settings.one_of("bits" if "bits" in settings.values else "w_bit", [_BITS], _BITS)
    settings.one_of("version", ["gemm", "GEMM"], "gemm")
    settings.one_of("zero_point", [True], True)
    group_size = settings.group_size("group_size" if "group_size" in settings.values else "q_group_size", 128)
    found = Found({}, set())
    for name in parts.ending_in(".qweight"):
        found.matrices[f"{name}.weight"] = _matrix(parts, name, group_size)
        found.used.update(f"{name}.{part}" for part in ("qweight", "qzeros", "scales"))
    return found


def _matrix(parts: TensorParts, name: str, group_size: int | None) -> IntegerMatrix:
    qweight, qzeros, scales = (f"{name}.{part}" for part in ("qweight", "qzeros", "scales"))
    info = parts.info(qweight, ["int32"], 2)
    num_inputs, num_words = info.shape
    group = group_size or num_inputs
    if num_inputs % group:
        raise parts.misfit(qweight, f"has {num_inputs} rows, which are no groups of {group}")
    num_groups = num_inputs // group
    zero_info = parts.check_shape(qzeros, ["int32"], num_groups, num_words)
    scale_info = parts.check_shape(scales, ["float16", "bfloat16"], num_groups, num_words * _IN_WORD)

    def read(start: int, stop: int) -> Integers:
        return Integers(
            _unpack_outputs(parts, qweight, start, stop),
            parts.columns(scales, start, stop).T,
            _unpack_outputs(parts, qzeros, start, stop).to(torch.int16),
        )

    return IntegerMatrix(
        shape=(num_words * _IN_WORD, num_inputs),
        num_bytes=info.num_bytes + zero_info.num_bytes + scale_info.num_bytes,
        file=info.file,
        bits=_BITS,
        group=group,
        scales_in=scale_info.stored_as,
        read=read,
    )


def _unpack_outputs(parts: TensorParts, name: str, start: int, stop: int) -> Tensor:
    """Return the stored values of outputs [start, stop): [stop - start, rows of the tensor] uint8."""
    first = start // _IN_WORD
    words = parts.columns(name, first, -(-stop // _IN_WORD))
    outputs = unpack(words, _BITS).view(*words.shape, _IN_WORD)[..., _PLACES].flatten(1)
    return outputs[:, start - first * _IN_WORD : stop - first * _IN_WORD].T.contiguous()
