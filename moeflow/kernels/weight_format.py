"""The forms in which weights are held, and what is to be known of each beside how the CPU kernels compute with it.

A new format is a name and a record here, and a struct in csrc/formats.h or csrc/block_formats.h, which packs and
unpacks it and says how products read it. All else that goes by format is derived from the two. Needs no torch.

"int8" and "int4" store groups of 32 values as integers with one fp16 scale, as GGUF's Q8_0 and Q4_0 do; "int4-min" with
a scale and a minimum, as Q4_1 does. The last is for weights that files have so: nothing else is rounded to it. The
formats after it hold one kind of GGUF's blocks each, under its name, and nothing else at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, get_args

WeightFormat = Literal[
    "float32",
    "bfloat16",
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
]
BlockKind = Literal[  # of GGUF's blocks, those that kernels read
    "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatRecord:
    """One format."""

    bits_per_value: float  # its share of scales included
    keeps: frozenset[str] = frozenset()  # what of a file it holds without loss: dtypes, `BlockKind`s; float32: anything
    option: Literal["--dtype", "--quantize"] | None = None  # that asks for it; None: only weights that are so have it
    wider: WeightFormat | None = None  # as fast as this one where its own speed was not measured
    smaller: WeightFormat | None = None  # what to ask for instead, if it takes too much
    is_made: bool = True  # of floats, rounded; else it holds nothing but what it keeps


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFormats:
    """The formats of one layer's matrices where a file has several; projections are named as in checkpoints."""

    q_proj: WeightFormat
    k_proj: WeightFormat
    v_proj: WeightFormat
    o_proj: WeightFormat
    up: WeightFormat  # of the experts, or the dense network: also of the gate
    down: WeightFormat


def _of_blocks(kind: BlockKind, *, bits_per_value: float, wider: WeightFormat) -> FormatRecord:
    """Return the record of a format for one kind of blocks: other weights are never brought to it."""
    return FormatRecord(bits_per_value=bits_per_value, keeps=frozenset({kind}), wider=wider, is_made=False)


FORMATS: Final[Mapping[str, FormatRecord]] = {
    "float32": FormatRecord(bits_per_value=32, option="--dtype", smaller="bfloat16"),
    "bfloat16": FormatRecord(
        bits_per_value=16, keeps=frozenset({"bfloat16"}), option="--dtype", wider="float32", smaller="int8"
    ),
    "int8": FormatRecord(
        bits_per_value=8.5, keeps=frozenset({"Q8_0", "Q4_0"}), option="--quantize", wider="bfloat16", smaller="int4"
    ),
    "int4": FormatRecord(bits_per_value=4.5, keeps=frozenset({"Q4_0"}), option="--quantize", wider="int8"),
    "int4-min": FormatRecord(bits_per_value=5, keeps=frozenset({"Q4_1"}), wider="int4"),
    "q5_0": _of_blocks("Q5_0", bits_per_value=5.5, wider="int4"),
    "q5_1": _of_blocks("Q5_1", bits_per_value=6, wider="int4"),
    "q2_k": _of_blocks("Q2_K", bits_per_value=2.625, wider="int4"),
    "q3_k": _of_blocks("Q3_K", bits_per_value=3.5625, wider="int4"),
    "q4_k": _of_blocks("Q4_K", bits_per_value=4.625, wider="int4"),
    "q5_k": _of_blocks("Q5_K", bits_per_value=5.625, wider="int4"),
    "q6_k": _of_blocks("Q6_K", bits_per_value=6.5625, wider="int4"),
    "iq4_nl": _of_blocks("IQ4_NL", bits_per_value=4.5, wider="int4"),
    "iq4_xs": _of_blocks("IQ4_XS", bits_per_value=4.3125, wider="int4"),
    "mxfp4": _of_blocks("MXFP4", bits_per_value=4.25, wider="int4"),
}

BLOCK_COLUMNS: Final = 256  # of files' largest blocks: what a multiple of this has is whole blocks of any kind
BAND: Final = 16  # output rows that lie together in a packed matrix
ALL_FORMATS: Final[tuple[WeightFormat, ...]] = get_args(WeightFormat)
MADE_FORMATS: Final = tuple(name for name in ALL_FORMATS if FORMATS[name].is_made)
DTYPES: Final = tuple(name for name in ALL_FORMATS if FORMATS[name].option == "--dtype")
QUANTIZED: Final = tuple(name for name in ALL_FORMATS if FORMATS[name].option == "--quantize")
WEIGHT_FORMATS: Final = (*DTYPES, *QUANTIZED)  # that any weights can be brought to
BITS_PER_VALUE: Final = {name: record.bits_per_value for name, record in FORMATS.items()}
BLOCK_KINDS: Final[tuple[BlockKind, ...]] = get_args(BlockKind)
