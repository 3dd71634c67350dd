"""Reads `"quant_method": "absmax"`: N.weight [rows, cols] int8 times N.weight_scale [rows] float32."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from moeflow.checkpoint.quantized.matrix import Found
from moeflow.checkpoint.quantized.parts import TensorParts
from moeflow.checkpoint.quantized.settings import QuantizationSettings

SCALE = ".weight_scale"


def find_matrices(parts: TensorParts, settings: QuantizationSettings, config: Mapping[str, Any]) -> Found:
    """Return the matrices of a folder. Raises: CheckpointError if their parts do not match."""
    found = Found({}, set())
    for name in parts.ending_in(SCALE):
        weight = parts.info(f"{name}.weight", ["int8"], num_dims=2)
        parts.check_shape(name + SCALE, ["float32"], weight.shape[0])
        found.matrices[f"{name}.weight"] = Matrix(parts, name, weight.shape, weight.num_bytes, weight.file)
        found.used.update((f"{name}.weight", name + SCALE))
    return found


@dataclass(frozen=True)
class Matrix:
    """One of them: no kernel computes from its bytes, so rows are widened as they are read."""

    parts: TensorParts
    name: str
    shape: tuple[int, int]
    num_bytes: int
    file: Path
    kind: None = None
    described: str = "int8"

    def read_values(self, start: int, stop: int) -> Tensor:
        """Return rows [start, stop) as floats."""
        scales = self.parts.rows(self.name + SCALE, start, stop)
        return self.parts.rows(f"{self.name}.weight", start, stop).float() * scales[:, None]

    def read_blocks(self, start: int, stop: int) -> Tensor:
        """Never called: there is no kind."""
        raise NotImplementedError
