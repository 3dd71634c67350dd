"""The formats of weights on a GPU: blocks of files as they are, floats, or integers that are made of floats."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace

from moeflow.checkpoint.checkpoint import FLOATS, Checkpoint
from moeflow.kernels.weight_format import DEVICE_DTYPES, PLANAR_BITS, LayerFormats, WeightFormat
from moeflow.models.layers.decoder import CausalLM
from moeflow.models.loading import NamesApart, names_apart
from moeflow.planner.choices.weight_choice import (
    WeightChoice,
    check_alone,
    keeper_of,
    kinds_of,
    known_format,
    matrices_of,
    own_precision,
)
from moeflow.settings.settings import Settings


def own_on_device(checkpoint: Checkpoint, *, has_bfloat16: bool) -> WeightChoice:
    """Return the checkpoint's formats that kernels of a GPU read; other weights are floats, mostly of 16 bits."""
    own = own_precision(checkpoint, lambda _: True, is_exact=False)
    floats = _type_of_floats(checkpoint, has_bfloat16=has_bfloat16)

    _, head, _ = (keeper_of(checkpoint, [name]) for name in CausalLM.embedding_names)
    chosen = replace(
        own,
        matrices=own.matrices if own.matrices in PLANAR_BITS else floats,
        embeddings=floats,
        head=head if head in PLANAR_BITS else None,
        layer_table=None,
        layers=tuple(_with_floats(layer, floats) for layer in own.layers),
        is_planar=True,
    )
    parts = list(_parts(checkpoint, names_apart(checkpoint), chosen))
    kept = sorted({it for it, _ in parts if it in PLANAR_BITS})
    unpacked = sorted({kind for it, kinds in parts if it not in PLANAR_BITS for kind in kinds - {*FLOATS}})
    if not kept:
        alike = for_device(checkpoint, has_bfloat16=has_bfloat16)
        more = f", and no kernel of theirs reads {' and '.join(unpacked)}" if unpacked else ""
        return replace(alike, reason=alike.reason + more)
    reason = f"the file's {' and '.join(kept)}, no value changes; other weights are {floats}"
    if unpacked:
        reason += f", and no GPU kernel reads {' and '.join(unpacked)} there"
    return replace(chosen, reason=reason)


def _with_floats(layer: LayerFormats, floats: WeightFormat) -> LayerFormats:
    """Return floats in the place of formats that no kernel of a GPU reads."""
    changed = {part: floats for part, it in asdict(layer).items() if it is not None and it not in PLANAR_BITS}
    return replace(layer, **changed)


def _type_of_floats(checkpoint: Checkpoint, *, has_bfloat16: bool) -> WeightFormat:
    """Return the type of a GPU's activations, and of weights in no other format."""
    apart = names_apart(checkpoint)
    tables = {checkpoint.tensors[name].stored_as for name in apart.embeddings if name in checkpoint.tensors}
    floats = {*tables, *(info.stored_as for info in matrices_of(checkpoint, apart))}.intersection(FLOATS)
    return "float16" if floats == {"float16"} else in_half(has_bfloat16=has_bfloat16).matrices


def _parts(checkpoint: Checkpoint, apart: NamesApart, chosen: WeightChoice) -> Iterator[tuple[WeightFormat, set[str]]]:
    """Yield the format of each part of layers, and how the file stores it."""
    if not chosen.layers:
        yield chosen.matrices, {info.stored_as for info in matrices_of(checkpoint, apart)}
        return
    for layer, names in zip(chosen.layers, apart.layers, strict=True):
        yield from ((layer.of(part), kinds_of(checkpoint, found)) for part, found in names.items())


def for_device(checkpoint: Checkpoint, *, has_bfloat16: bool) -> WeightChoice:
    """Return floats for all of a checkpoint's weights."""
    stored_as = stored_formats(checkpoint)
    for name in DEVICE_DTYPES:
        if stored_as <= {name} and (name != "bfloat16" or has_bfloat16):
            return WeightChoice(name, name, "the checkpoint's precision")
    return in_half(has_bfloat16=has_bfloat16)


def stored_formats(checkpoint: Checkpoint) -> set[str]:
    """Return what a checkpoint's matrices are stored as."""
    return {info.stored_as for info in matrices_of(checkpoint, names_apart(checkpoint))}


def quantized_on_device(settings: Settings, *, has_bfloat16: bool) -> WeightChoice:
    """Return the formats of a GPU's weights with matrices of layers in integers. Raises: ConfigError for two formats.

    Other weights have 16 bits.
    """
    quantize = str(settings.quantize)
    check_alone(quantize, settings.dtype)
    floats = in_half(has_bfloat16=has_bfloat16).matrices
    return WeightChoice(known_format(quantize), floats, head="int8", is_planar=True)


def in_half(*, has_bfloat16: bool) -> WeightChoice:
    """Return the format of 16 bits that a GPU computes fast."""
    if has_bfloat16:
        return WeightChoice("bfloat16", "bfloat16", "GPUs compute in 16 bits")
    return WeightChoice("float16", "float16", "this GPU computes slowly in bfloat16")
