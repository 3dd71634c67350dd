"""The formats of NVIDIA's ModelOpt: NVFP4 and float8, each for all linear layers except the excluded ones.

What activations and keys and values were to be rounded to is not followed: here they stay finer.
"""

from __future__ import annotations

from moeflow.checkpoint.quantized import float8, nvfp4
from moeflow.checkpoint.quantized.matrix import Found
from moeflow.checkpoint.quantized.parts import TensorParts
from moeflow.checkpoint.quantized.settings import QuantizationSettings


def find_matrices(parts: TensorParts, settings: QuantizationSettings) -> Found:
    """Return the linear layers. Raises: CheckpointError."""
    if "quantization" in settings.values:  # as in ModelOpt's own file
        settings = settings.inner("quantization", settings.values["quantization"])
    if settings.one_of("quant_algo", ["NVFP4", "W4A16_NVFP4", "FP8"]) == "FP8":
        return float8.find_matrices(parts, settings, "_scale", None)
    settings.one_of("group_size", [16], 16)
    return nvfp4.find_matrices(parts, nvfp4.MODELOPT)
