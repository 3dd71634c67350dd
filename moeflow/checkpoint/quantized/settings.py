"""What `quantization_config` in config.json says, read with errors that name method, field and remedy."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from moeflow.checkpoint.safetensors.folder import QUANTIZATION_KEYS
from moeflow.core.errors import CheckpointError
from moeflow.core.truncated_repr import truncated_repr

READ: Final = (
    "mxfp4, fp8, modelopt (NVFP4 and FP8), compressed-tensors (int4, int8, float8 and NVFP4), awq (gemm), and gptq "
    "(4 or 8 bits, without act order) or auto-round, which packs like these two"
)
REMEDY: Final = f"Take the model's unquantized weights, a GGUF file, or one of the quantizations that are read: {READ}"

_UNQUANTIZED_BITS: Final = (16, 32)  # of layers that are left as they are


class QuantizationSettings:
    """An object in a config, or one inside it."""

    def __init__(self, values: Mapping[str, Any], file: Path, place: str = QUANTIZATION_KEYS[0]) -> None:
        """Take the value at `place` in the config `file`."""
        self.values = values
        self.file = file
        self._place = place

    @classmethod
    def of(cls, config: Mapping[str, Any], file: Path) -> QuantizationSettings | None:
        """Return those of a whole config; None: its weights are not quantized. Raises: CheckpointError."""
        for key in QUANTIZATION_KEYS:
            if config.get(key) is not None:
                if not isinstance(config[key], dict):
                    raise CheckpointError(f"{key} is no object", file=file, remedy=REMEDY)
                return cls(config[key], file, key)
        return None

    @property
    def method(self) -> str:
        """The name of the quantization."""
        method = self.values.get("quant_method")
        return method if isinstance(method, str) else "method not named"

    def refuse(self, problem: str) -> CheckpointError:
        """Make the error that names the unsupported property of the quantization."""
        return CheckpointError(
            f"{self._place} has quantized weights ({self.method}), {problem}",
            file=self.file,
            remedy=REMEDY,
        )

    def one_of(self, field: str, supported: Collection[Any], default: Any = None) -> Any:
        """Return the value of a field. Raises: CheckpointError if it is none of the supported ones."""
        value = self.values.get(field)
        value = default if value is None else value
        # JSON's true is no 1.
        if not any(value == known and type(value) is type(known) for known in supported):
            listed = ", ".join(map(truncated_repr, supported))
            raise self.refuse(f"where {field} {truncated_repr(value)} is not supported, only {listed}")
        return value

    def group_size(self, field: str, default: int | None = None) -> int | None:
        """Return how many neighbours share a scale, None if a whole row does. Raises: CheckpointError."""
        value = self.values.get(field, default)
        if value in (-1, None):
            return None
        if type(value) is not int or value <= 0:
            raise self.refuse(f"where {field} {truncated_repr(value)} is no number of values")
        return value

    def check_overrides(self, field: str) -> None:
        """Check that a field, which says of some layers how they differ, says of none of the quantized that it does.

        Raises: CheckpointError.
        """
        of_layers = self.values.get(field)
        for layer, own in of_layers.items() if isinstance(of_layers, dict) else ():
            if not isinstance(own, dict) or own.get("bits") in _UNQUANTIZED_BITS:
                continue
            for name in ("bits", "group_size"):
                if name in own and own[name] != self.values.get(name):
                    raise self.refuse(
                        f"where {field} gives {truncated_repr(layer)} a {name} of its own, "
                        f"{truncated_repr(own[name])}: "
                        "one way for all matrices is supported"
                    )

    def inner(self, field: str, values: Any) -> QuantizationSettings:
        """Return the settings that a field holds. Raises: CheckpointError if that is no object."""
        if not isinstance(values, dict):
            raise self.refuse(f"where {field} is no object")
        return QuantizationSettings({"quant_method": self.method, **values}, self.file, self._place)
