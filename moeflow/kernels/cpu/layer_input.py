"""What a layer makes of an input of its own for each token, behind its network, by the CPU extension."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from moeflow.kernels.activation import Nonlinearity, kernel_arguments
from moeflow.kernels.arrays import Array
from moeflow.kernels.cpu import extension
from moeflow.kernels.cpu.arguments import floats
from moeflow.kernels.cpu.packed_weight import PackedWeight
from moeflow.kernels.cpu.stages import bind_norm
from moeflow.kernels.norm import NormWeights

if extension.is_available():
    import moeflow.kernels._cpu as _cpu


@dataclass(frozen=True, slots=True)
class PackedLayerInput:
    """`(h + norm(projection(function(gate(h)) * input))) * scale`."""

    gate: PackedWeight  # [P, H]
    projection: PackedWeight  # [H, P]
    norm: NormWeights
    function: Nonlinearity
    scale: Array | None  # [1]; None: 1
    handle: Any = field(init=False, repr=False, compare=False)  # looks at the memory of all of these

    def __post_init__(self) -> None:
        size, hidden = self.gate.rows, self.gate.cols
        if (self.projection.rows, self.projection.cols) != (hidden, size):
            raise ValueError(f"{self.gate} and {self.projection} do not match")
        handle = _cpu.LayerInput(
            gate=self.gate.handle,
            projection=self.projection.handle,
            norm=bind_norm(self.norm, hidden),
            function=kernel_arguments(self.function)["function"],
            scale=floats(self.scale, 1),
        )
        object.__setattr__(self, "handle", handle)

    def __call__(self, hidden: Array, inputs: Array, number: int) -> Array:
        """Change hidden states by what layer `number` of `inputs` gets.

        Shapes: hidden [T, H], changed; inputs [T, L, P] -> [T, H]; both float32.
        """
        num_tokens, num_layers, size = inputs.shape
        _cpu.layer_input(
            layer=self.handle,
            inputs=floats(inputs, num_tokens, num_layers, self.gate.rows) + 4 * number * size,
            inputs_stride=num_layers * size,
            num_tokens=num_tokens,
            hidden=floats(hidden, num_tokens, self.gate.cols),
        )
        return hidden
