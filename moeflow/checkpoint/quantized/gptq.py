"""GPTQ with its groups in the order of inputs: without `desc_act`, or where that has moved no input to another group.

For a linear layer `X` of `in` inputs and `out` outputs, with `n` numbers in a word of 32 bits, the lowest first:

    X.qweight   [in / n, out] int32         n inputs a word
    X.qzeros    [groups, out / n] int32     zero points less one, which wrap around; in `gptq_v2` as they are
    X.scales    [groups, out] float16 or bfloat16
    X.g_idx     [in] int32                  the group of each input

A weight is (code - zero point) * scale. Source: AutoGPTQ's and GPTQModel's quantized linear layers.
"""

from __future__ import annotations

from moeflow.checkpoint.quantized.integers import IntegerMatrix, Integers, unpack
from moeflow.checkpoint.quantized.matrix import Found
from moeflow.checkpoint.quantized.parts import TensorParts
from moeflow.checkpoint.quantized.settings import QuantizationSettings
from moeflow.kernels.on_demand import torch

_PARTS = ("qweight", "qzeros", "scales", "g_idx")
_ACT_ORDER = "its inputs are not grouped in their order, as act order (desc_act) does"


def find_matrices(parts: TensorParts, settings: QuantizationSettings) -> Found:
    """Return the linear layers. Raises: CheckpointError."""
    bits = settings.one_of("bits", [4, 8])
    may_be_moved = settings.one_of("desc_act", [False, True], False)
    settings.check_overrides("dynamic")
    version = settings.one_of("checkpoint_format", ["gptq", "gptq_v2"], "gptq")
    group_size = settings.group_size("group_size", 128)
    found = Found({}, set())
    for name in parts.ending_in(".qweight"):
        offset = 1 if version == "gptq" else 0
        found.matrices[f"{name}.weight"] = _matrix(parts, name, bits, group_size, offset)
        found.used.update(f"{name}.{part}" for part in _PARTS)
    names = [name.removesuffix(".weight") for name in found.matrices]
    if may_be_moved and names and not _are_in_order(parts, names[0], group_size):  # holds for all if for one
        raise settings.refuse("where desc_act True moves inputs to other groups, which is not supported")
    return found


def _are_in_order(parts: TensorParts, name: str, group_size: int | None) -> bool:
    """Return whether a layer's groups are of neighbouring inputs, which it has to say."""
    if not parts.has(f"{name}.g_idx"):
        return False
    groups = parts.whole(f"{name}.g_idx")
    return torch.equal(groups, torch.arange(len(groups), dtype=torch.int32) // (group_size or len(groups)))


def _matrix(parts: TensorParts, name: str, bits: int, group_size: int | None, zero_offset: int) -> IntegerMatrix:
    qweight, qzeros, scales, g_idx = (f"{name}.{part}" for part in _PARTS)
    in_word = 32 // bits
    info = parts.info(qweight, ["int32"], 2)
    num_inputs, num_outputs = info.shape[0] * in_word, info.shape[1]
    group = group_size or num_inputs
    if num_inputs % group:
        raise parts.misfit(qweight, f"has {num_inputs} inputs, which are no groups of {group}")
    num_groups = num_inputs // group
    infos = [
        info,
        parts.check_shape(qzeros, ["int32"], num_groups, num_outputs // in_word),
        parts.check_shape(scales, ["float16", "bfloat16"], num_groups, num_outputs),
    ]
    if parts.has(g_idx):
        infos.append(parts.check_shape(g_idx, ["int32"], num_inputs))

    def read(start: int, stop: int) -> Integers:
        if parts.has(g_idx) and not _are_in_order(parts, name, group):
            raise parts.misfit(g_idx, _ACT_ORDER)
        codes = unpack(parts.columns(qweight, start, stop).T, bits)
        first = start // in_word
        stored = unpack(parts.columns(qzeros, first, -(-stop // in_word)), bits)
        zeros = stored[:, start - first * in_word : stop - first * in_word].T.to(torch.int16)
        return Integers(codes, parts.columns(scales, start, stop).T, (zeros + zero_offset) & ((1 << bits) - 1))

    return IntegerMatrix(
        shape=(num_outputs, num_inputs),
        num_bytes=sum(it.num_bytes for it in infos),
        file=info.file,
        bits=bits,
        group=group,
        scales_in=infos[2].stored_as,
        read=read,
    )
