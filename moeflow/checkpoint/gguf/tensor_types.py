"""How GGUF files store a tensor's numbers: all types by number, and the sizes of supported ones.

Written out, because the gguf package is slow to import. Tests compare the table with it. Source: ggml_type and the
blocks' structs in ggml's ggml.h and ggml-common.h.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from moeflow.kernels.weight_format import GGUF_BLOCK_KINDS


class TensorType(IntEnum):
    """A type by ggml's name and number."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39
    NVFP4 = 40
    Q1_0 = 41


# Without kernels of their own: read as levels (grids.py) or as NVFP4 in folders (nvfp4.py), or widened to float32.
_GRIDS: Final = (
    TensorType.IQ1_S,
    TensorType.IQ1_M,
    TensorType.IQ2_XXS,
    TensorType.IQ2_XS,
    TensorType.IQ2_S,
    TensorType.IQ3_XXS,
    TensorType.IQ3_S,
)
_WIDENED: Final = (TensorType.TQ1_0, TensorType.TQ2_0)
BLOCKS: Final = (*(TensorType[kind] for kind in GGUF_BLOCK_KINDS), *_GRIDS, TensorType.NVFP4, *_WIDENED)
SUPPORTED: Final = (TensorType.F32, TensorType.F16, TensorType.BF16, *BLOCKS)

BLOCK_SIZES: Final = {  # values and bytes of one block
    TensorType.F32: (1, 4),
    TensorType.F16: (1, 2),
    TensorType.BF16: (1, 2),
    TensorType.Q8_0: (32, 34),
    TensorType.Q4_0: (32, 18),
    TensorType.Q4_1: (32, 20),
    TensorType.Q5_0: (32, 22),
    TensorType.Q5_1: (32, 24),
    TensorType.Q2_K: (256, 84),
    TensorType.Q3_K: (256, 110),
    TensorType.Q4_K: (256, 144),
    TensorType.Q5_K: (256, 176),
    TensorType.Q6_K: (256, 210),
    TensorType.IQ4_NL: (32, 18),
    TensorType.IQ4_XS: (256, 136),
    TensorType.MXFP4: (32, 17),
    TensorType.NVFP4: (64, 36),
    TensorType.IQ1_S: (256, 50),
    TensorType.IQ1_M: (256, 56),
    TensorType.IQ2_XXS: (256, 66),
    TensorType.IQ2_XS: (256, 74),
    TensorType.IQ2_S: (256, 82),
    TensorType.IQ3_XXS: (256, 98),
    TensorType.IQ3_S: (256, 110),
    TensorType.TQ1_0: (256, 54),
    TensorType.TQ2_0: (256, 66),
}
