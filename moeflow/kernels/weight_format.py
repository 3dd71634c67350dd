"""The forms in which the CPU kernels hold weights: their names, and what they take of memory.

"int8" and "int4" store groups of 32 values as integers with one fp16 scale, as GGUF's Q8_0 and Q4_0 do; "int4-min" with
a scale and a minimum, as Q4_1 does. The last is for weights that files have so: nothing else is rounded to it.
"""

from __future__ import annotations

from typing import Literal

WeightFormat = Literal["float32", "bfloat16", "int8", "int4", "int4-min"]

WEIGHT_FORMATS: tuple[WeightFormat, ...] = ("float32", "bfloat16", "int8", "int4")  # that any weights can be brought to
BITS_PER_VALUE: dict[str, float] = {"float32": 32, "bfloat16": 16, "int8": 8.5, "int4": 4.5, "int4-min": 5.0}
GROUP_SIZE = 32  # neighbouring values of a row that share a scale

BlockKind = Literal["Q8_0", "Q4_0", "Q4_1"]

BLOCK_BYTES: dict[BlockKind, int] = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}  # of GGUF's blocks of 32 values
