"""Biases of the hidden units and the outputs of a layer's experts, in a few families."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final, NamedTuple

from moeflow.kernels.arrays import Array
from moeflow.kernels.cpu.arguments import floats

with suppress(ImportError):  # without it there are no handles; `cpu.why_not` says why
    import moeflow.kernels._cpu as _cpu

_FLOAT_BYTES: Final = 4


class ExpertBiases(NamedTuple):
    """Those of all experts of a layer. They are small: each process with some of the experts has all biases."""

    up: Array  # [E, 2I], gates first, or without a gate [E, I]
    down: Array  # [E, H]

    def parts(self, num_ups: int) -> list[tuple[Array, ...]]:
        """Return each expert's biases of gate, if there is one, up and down, to be filled: [I], [I] and [H]."""
        width = self.up.shape[1] // num_ups
        return [
            (*(up[first : first + width] for first in range(0, num_ups * width, width)), down)
            for up, down in zip(self.up, self.down, strict=True)
        ]

    def handle(self, num_ups: int, first_unit: int = 0, first_output: int = 0) -> Any:
        """Return them as kernels take them, who keep no memory alive; of slices of experts, from these places on."""
        num_experts, up_size = self.up.shape
        up = floats(self.up, num_experts, up_size) + _FLOAT_BYTES * first_unit
        return _cpu.ExpertBiases(
            gate=up if num_ups == 2 else 0,
            up=up + _FLOAT_BYTES * up_size // num_ups * (num_ups - 1),
            down=floats(self.down, num_experts, self.down.shape[1]) + _FLOAT_BYTES * first_output,
            up_stride=up_size,
            down_stride=self.down.shape[1],
        )
