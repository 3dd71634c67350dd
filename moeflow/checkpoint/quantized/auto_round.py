"""AutoRound, which packs integers like GPTQ or AWQ, named in `packing_format`."""

from __future__ import annotations

from moeflow.checkpoint.quantized import awq, gptq
from moeflow.checkpoint.quantized.matrix import Found
from moeflow.checkpoint.quantized.parts import TensorParts
from moeflow.checkpoint.quantized.settings import QuantizationSettings

_PACKINGS = {"auto_round:auto_gptq": gptq.find_matrices, "auto_round:auto_awq": awq.find_matrices}
_DEFAULT = "auto_round:auto_gptq"


def find_matrices(parts: TensorParts, settings: QuantizationSettings) -> Found:
    """Return the linear layers. Raises: CheckpointError."""
    settings.one_of("data_type", ["int"], "int")
    settings.check_overrides("extra_config")
    return _PACKINGS[settings.one_of("packing_format", tuple(_PACKINGS), _DEFAULT)](parts, settings)
