"""The formats of weights in memory, and the properties of each, apart from the CPU kernels' arithmetic.

A new format is a name and a record here, and a struct in csrc/formats/formats.h or csrc/formats/block_formats.h, which
packs and unpacks it and reads it for products. All else that goes by format is derived from the two. Needs no
torch.

"int8" and "int4" store groups of 32 values as integers with one fp16 scale, like GGUF's Q8_0 and Q4_0. "int4-min" adds
a minimum, like Q4_1. Only files have it: nothing else is rounded to it. Each later format holds one kind of blocks:

- GGUF's blocks, under their names
- integers with a scale and a zero point for 128, 64 or 32 neighbours (AWQ, GPTQ, compressed-tensors)
- 8-bit floats (e4m3) with a scale for 128 (checkpoints of DeepSeek and Qwen)
- levels of GGUF's grids (IQ1, IQ2, IQ3), four bits for each value
- 4-bit floats (e2m1) with a scale for 16 (NVFP4 of ModelOpt and compressed-tensors)

Only GPUs compute with "float16" weights: it has no record.

A search for the scales with the least error makes some of GGUF's blocks from floats (csrc/formats/quantize.cpp). A
*mix* selects a format for each matrix of a model (planner/choices/mixes.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Final, Literal, get_args

import msgspec

WeightFormat = Literal[
    "float32",
    "bfloat16",
    "float16",
    "int8",
    "int4",
    "int4-min",
    "q5_0",
    "q5_1",
    "q2_k",
    "q3_k",
    "q4_k",
    "q5_k",
    "q6_k",
    "iq4_nl",
    "iq4_xs",
    "mxfp4",
    "int4-g128",
    "int4-g64",
    "int4-g32",
    "int8-g128",
    "fp8",
    "levels-iq2",
    "levels-iq3-xxs",
    "levels-iq3-s",
    "nvfp4",
]
Mix = Literal["q4_k", "q4_k_m"]  # of formats: what --quantize takes, beside formats
GGUFBlockKind = Literal[  # GGUF's blocks that kernels read
    "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"
]
GroupKind = Literal["INT4_G128", "INT4_G64", "INT4_G32", "INT8_G128", "F8_E4M3", "NVFP4"]  # of quantized folders
LevelKind = Literal["LEVELS_IQ2", "LEVELS_IQ3_XXS", "LEVELS_IQ3_S"]  # that GGUF's IQ1, IQ2 and IQ3 become
BlockKind = GGUFBlockKind | GroupKind | LevelKind


class FormatRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One format."""

    bits_per_value: float  # its share of scales included
    planar_bits: float = 0  # the same as a GPU's kernels read it (triton/planar_weights.py); 0: they do not
    keeps: frozenset[str] = frozenset()  # what of a file it holds without loss: dtypes, `BlockKind`s; float32: anything
    option: Literal["--dtype", "--quantize"] | None = None  # that asks for it; None: only weights that are so have it
    wider: WeightFormat | None = None  # as fast as this one where its own speed was not measured
    smaller: WeightFormat | Mix | None = None  # what to ask for instead, if it takes too much
    is_made: bool = True  # of floats, rounded; else it holds blocks, and only the kinds it keeps,
    is_searched: bool = False  # unless the blocks for floats are searched for


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFormats:
    """The formats of one layer's matrices where a file has several; projections are named as in checkpoints."""

    q_proj: WeightFormat
    k_proj: WeightFormat
    v_proj: WeightFormat
    o_proj: WeightFormat
    up: WeightFormat  # of the experts, or the dense network: also of the gate
    down: WeightFormat
    shared_up: WeightFormat | None = None  # of a shared expert; None: as of the others
    shared_down: WeightFormat | None = None  # likewise
    layer_input: WeightFormat | None = None  # of what takes an input of the layer's own; None: as `up`

    def of(self, part: str) -> WeightFormat:
        """Return the format of what a field is about."""
        found: WeightFormat | None = getattr(self, part)
        return found or self.of("up" if part == "layer_input" else part.removeprefix("shared_"))


LAYER_PARTS: Final = frozenset(field.name for field in fields(LayerFormats))


def _of_blocks(
    kind: BlockKind, *, bits_per_value: float, wider: WeightFormat, planar_bits: float = 0, is_searched: bool = False
) -> FormatRecord:
    """Return the record of a format for one kind of blocks."""
    return FormatRecord(
        bits_per_value=bits_per_value,
        planar_bits=planar_bits,
        keeps=frozenset({kind}),
        wider=wider,
        is_made=False,
        is_searched=is_searched,
    )


FORMATS: Final[Mapping[str, FormatRecord]] = {
    "float32": FormatRecord(bits_per_value=32, option="--dtype", smaller="bfloat16"),
    "bfloat16": FormatRecord(
        bits_per_value=16, keeps=frozenset({"bfloat16"}), option="--dtype", wider="float32", smaller="int8"
    ),
    "int8": FormatRecord(
        bits_per_value=8.5,
        planar_bits=8.5,
        keeps=frozenset({"Q8_0", "Q4_0"}),
        option="--quantize",
        wider="bfloat16",
        smaller="q4_k",
    ),
    "int4": FormatRecord(
        bits_per_value=4.5, planar_bits=4.5, keeps=frozenset({"Q4_0"}), option="--quantize", wider="int8"
    ),
    "int4-min": FormatRecord(bits_per_value=5, keeps=frozenset({"Q4_1"}), wider="int4"),
    "q5_0": _of_blocks("Q5_0", bits_per_value=5.5, planar_bits=8.5, wider="int4", is_searched=True),
    "q5_1": _of_blocks("Q5_1", bits_per_value=6, wider="int4"),
    "q2_k": _of_blocks("Q2_K", bits_per_value=2.625, wider="int4"),
    "q3_k": _of_blocks("Q3_K", bits_per_value=3.5625, wider="int4"),
    "q4_k": _of_blocks("Q4_K", bits_per_value=4.625, planar_bits=4.625, wider="int4", is_searched=True),
    "q5_k": _of_blocks("Q5_K", bits_per_value=5.625, planar_bits=5.625, wider="int4", is_searched=True),
    "q6_k": _of_blocks("Q6_K", bits_per_value=6.5625, planar_bits=6.625, wider="int4", is_searched=True),
    "iq4_nl": _of_blocks("IQ4_NL", bits_per_value=4.5, planar_bits=8.5, wider="int4", is_searched=True),
    "iq4_xs": _of_blocks("IQ4_XS", bits_per_value=4.3125, wider="int4"),
    "mxfp4": _of_blocks("MXFP4", bits_per_value=4.25, planar_bits=4.25, wider="int4"),
    "int4-g128": _of_blocks("INT4_G128", bits_per_value=4.25, planar_bits=4.25, wider="int4"),
    "int4-g64": _of_blocks("INT4_G64", bits_per_value=4.375, planar_bits=4.5, wider="int4"),
    "int4-g32": _of_blocks("INT4_G32", bits_per_value=4.75, planar_bits=5, wider="int4"),
    "int8-g128": _of_blocks("INT8_G128", bits_per_value=8.25, planar_bits=8.25, wider="int8"),
    "fp8": _of_blocks("F8_E4M3", bits_per_value=8.25, planar_bits=8.25, wider="int8"),
    "levels-iq2": _of_blocks("LEVELS_IQ2", bits_per_value=4.5625, wider="int4"),
    "levels-iq3-xxs": _of_blocks("LEVELS_IQ3_XXS", bits_per_value=4.3125, wider="int4"),
    "levels-iq3-s": _of_blocks("LEVELS_IQ3_S", bits_per_value=4.3125, wider="int4"),
    "nvfp4": _of_blocks("NVFP4", bits_per_value=4.625, wider="int4"),
}

BLOCK_COLUMNS: Final = 256  # of files' largest blocks: what a multiple of this has is whole blocks of any kind
_MADE_COLUMNS: Final = 32  # that share a scale where integers are made here
_BLOCK_COLUMNS: Final = 256  # a multiple of all blocks of files
BAND: Final = 16  # output rows of one band of a packed matrix
ALL_FORMATS: Final[tuple[WeightFormat, ...]] = tuple(name for name in get_args(WeightFormat) if name != "float16")
MADE_FORMATS: Final = tuple(name for name in ALL_FORMATS if FORMATS[name].is_made)
DTYPES: Final = tuple(name for name in ALL_FORMATS if FORMATS[name].option == "--dtype")
DEVICE_DTYPES: Final[tuple[WeightFormat, ...]] = (*DTYPES, "float16")  # that GPUs compute in
QUANTIZED: Final = tuple(name for name in ALL_FORMATS if FORMATS[name].option == "--quantize")
SEARCHED_FORMATS: Final = tuple(name for name in ALL_FORMATS if FORMATS[name].is_searched)
WEIGHT_FORMATS: Final = (*DTYPES, *QUANTIZED)  # that any weights can be brought to
MIXES: Final[tuple[Mix, ...]] = get_args(Mix)
SUGGESTED_FORMATS: Final = ("int8", "q4_k_m")  # that users are told of, where they set none
BITS_PER_VALUE: Final = {name: record.bits_per_value for name, record in FORMATS.items()}
PLANAR_BITS: Final = {name: record.planar_bits for name, record in FORMATS.items() if record.planar_bits}
GGUF_BLOCK_KINDS: Final[tuple[GGUFBlockKind, ...]] = get_args(GGUFBlockKind)
GROUP_KINDS: Final[tuple[GroupKind, ...]] = get_args(GroupKind)
LEVEL_KINDS: Final[tuple[LevelKind, ...]] = get_args(LevelKind)
BLOCK_KINDS: Final[tuple[BlockKind, ...]] = (*GGUF_BLOCK_KINDS, *GROUP_KINDS, *LEVEL_KINDS)


def cut_unit(weight_format: str) -> int:
    """Return a number of columns after which a GPU's matrix of this format may be cut."""
    if weight_format not in PLANAR_BITS:
        return 1
    return _MADE_COLUMNS if FORMATS[weight_format].is_made else _BLOCK_COLUMNS


def block_kind(weight_format: WeightFormat) -> BlockKind:
    """Return the kind of blocks that a format which is not made holds."""
    (kind,) = FORMATS[weight_format].keeps
    return next(known for known in BLOCK_KINDS if known == kind)
