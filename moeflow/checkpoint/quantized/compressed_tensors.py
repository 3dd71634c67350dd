"""The formats of compressed-tensors, llm-compressor's: integers of four or eight bits, float8, and NVFP4.

For a linear layer `X` of `in` inputs and `out` outputs:

    pack-quantized
        X.weight_packed      [out, in / n] int32     n numbers a word, the lowest first, raised by half their range
        X.weight_scale       [out, groups]
        X.weight_zero_point  [out / n, groups] int32     outputs packed likewise; without it half the range
        X.weight_shape       not looked at
    int-quantized
        X.weight             [out, in] int8
        X.weight_scale, X.weight_zero_point     [out, groups], [out, 1] or [1]
    float-quantized
        X.weight             [out, in] float8; see float8.py
    nvfp4-pack-quantized
        X.weight_packed      [out, in / 2] uint8; see nvfp4.py

A weight is (code - zero point) * scale. What activations are rounded to is not followed: here they stay finer. Source:
the package compressed-tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moeflow.checkpoint.checkpoint import TensorInfo
from moeflow.checkpoint.quantized import float8, nvfp4
from moeflow.checkpoint.quantized.integers import IntegerMatrix, Integers, unpack
from moeflow.checkpoint.quantized.matrix import Found
from moeflow.checkpoint.quantized.parts import SCALES, TensorParts
from moeflow.checkpoint.quantized.settings import QuantizationSettings
from moeflow.kernels.on_demand import torch

if TYPE_CHECKING:
    from torch import Tensor

_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_NVFP4 = "nvfp4-pack-quantized"


def find_matrices(parts: TensorParts, settings: QuantizationSettings) -> Found:
    """Return the linear layers. Raises: CheckpointError."""
    weights = _weights(settings)
    if weights.one_of("type", ["int", "float"], "int") == "float":
        if settings.one_of("format", ["float-quantized", "naive-quantized", _NVFP4]) == _NVFP4:
            weights.one_of("num_bits", [4])
            weights.one_of("group_size", [16])
            return nvfp4.find_matrices(parts, nvfp4.COMPRESSED_TENSORS)
        weights.one_of("num_bits", [8])
        block = weights.values.get("block_structure") if weights.values.get("strategy") == "block" else None
        return float8.find_matrices(parts, weights, "_scale", block)
    bits = weights.one_of("num_bits", [4, 8])
    is_packed = settings.one_of("format", _FORMATS) == "pack-quantized"
    weights.one_of("strategy", ["group", "channel", "tensor"], "channel")
    group_size = weights.group_size("group_size")
    found = Found({}, set())
    for name in parts.ending_in(".weight_packed" if is_packed else ".weight_scale"):
        if parts.has(f"{name}.weight_g_idx"):
            raise parts.misfit(f"{name}.weight_g_idx", "groups inputs in another order than theirs (act order)")
        matrix = _packed(parts, name, bits, group_size) if is_packed else _plain(parts, name, group_size)
        found.matrices[f"{name}.weight"] = matrix
        used = ("weight_packed", "weight_shape") if is_packed else ("weight",)
        found.used.update(f"{name}.{part}" for part in (*used, "weight_scale", "weight_zero_point"))
    return found


def _weights(settings: QuantizationSettings) -> QuantizationSettings:
    """Return how weights are quantized, which has to be one way for all that are."""
    groups = settings.values.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise settings.refuse("where config_groups names no group")
    of_groups: list[dict[str, Any]] = []
    for name, group in groups.items():
        weights = settings.inner(f"config_groups.{name}", group).values.get("weights")
        weights = settings.inner(f"config_groups.{name}.weights", weights).values
        if weights not in of_groups:
            of_groups.append(dict(weights))
    if len(of_groups) > 1:
        raise settings.refuse("where config_groups quantizes weights in more than one way, which is not supported")
    return settings.inner("weights", of_groups[0])


def _packed(parts: TensorParts, name: str, bits: int, group_size: int | None) -> IntegerMatrix:
    packed, zero_name = f"{name}.weight_packed", f"{name}.weight_zero_point"
    in_word, middle = 32 // bits, 1 << (bits - 1)
    info = parts.info(packed, ["int32"], 2)
    num_rows, num_cols = info.shape[0], info.shape[1] * in_word
    group = group_size or num_cols
    scale = _Scale(parts, name, info, num_rows, num_cols, group)
    has_zeros, num_bytes = parts.has(zero_name), info.num_bytes + scale.num_bytes
    if has_zeros:
        zero_shape = (-(-num_rows // in_word), num_cols // group)
        num_bytes += parts.check_shape(zero_name, ["int32"], *zero_shape).num_bytes

    def read(start: int, stop: int) -> Integers:
        codes, scales = unpack(parts.rows(packed, start, stop), bits), scale.read(start, stop)
        if not has_zeros:
            return Integers(codes, scales, torch.full(scales.shape, middle, dtype=torch.int16))
        first = start // in_word
        words = parts.rows(zero_name, first, -(-stop // in_word))
        zeros = unpack(words[..., None], bits).transpose(1, 2).flatten(0, 1)  # [words, groups, n] -> [outputs, groups]
        return Integers(codes, scales, zeros[start - first * in_word : stop - first * in_word].to(torch.int16))

    return IntegerMatrix(
        shape=(num_rows, num_cols),
        num_bytes=num_bytes,
        file=info.file,
        bits=bits,
        group=group,
        scales_in=scale.dtype,
        read=read,
    )


def _plain(parts: TensorParts, name: str, group_size: int | None) -> IntegerMatrix:
    weight, zero_name = f"{name}.weight", f"{name}.weight_zero_point"
    info = parts.info(weight, ["int8"], 2)
    num_rows, num_cols = info.shape
    group = group_size or num_cols
    scale = _Scale(parts, name, info, num_rows, num_cols, group)
    zero = _Scale(parts, name, info, num_rows, num_cols, group, "weight_zero_point") if parts.has(zero_name) else None

    def read(start: int, stop: int) -> Integers:
        codes = parts.rows(weight, start, stop).view(torch.uint8) ^ 128  # raised by 128
        scales = scale.read(start, stop)
        zeros = torch.zeros(scales.shape) if zero is None else zero.read(start, stop)
        return Integers(codes, scales, zeros.to(torch.int16) + 128)

    return IntegerMatrix(
        shape=(num_rows, num_cols),
        num_bytes=info.num_bytes + scale.num_bytes + (zero.num_bytes if zero else 0),
        file=info.file,
        bits=8,
        group=group,
        scales_in=scale.dtype,
        read=read,
    )


class _Scale:
    """Scales or zero points of a matrix: one for each group, each row, or all."""

    def __init__(
        self,
        parts: TensorParts,
        name: str,
        of: TensorInfo,
        num_rows: int,
        num_cols: int,
        group: int,
        part: str = "weight_scale",
    ) -> None:
        self._parts = parts
        self._name = f"{name}.{part}"
        info = parts.info(self._name, SCALES if part == "weight_scale" else ["int8"])
        self.dtype, self.num_bytes = info.stored_as, info.num_bytes
        self._of_all = info.shape in ((), (1,))
        if num_cols % group or not (self._of_all or info.shape == (num_rows, num_cols // group)):
            raise parts.misfit(
                self._name,
                f"has the shape {list(info.shape)}, where weights of {list(of.shape)} have groups of {group}",
            )

    def read(self, start: int, stop: int) -> Tensor:
        """Return those of some rows, [n, groups]."""
        if self._of_all:
            return self._parts.whole(self._name).view(1, 1).expand(stop - start, 1)
        return self._parts.rows(self._name, start, stop)
