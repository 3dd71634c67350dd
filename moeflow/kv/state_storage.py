"""The memory that states of recurrent layers live in: slots of one size, all of it taken at once.

Which request or prefix has which slot is not known here (`state_slots.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from moeflow.core.out_of_memory import out_of_memory_as
from moeflow.core.recurrent_config import RecurrentConfig
from moeflow.core.units import format_bytes
from moeflow.kernels.arrays import floats_on
from moeflow.kernels.recurrent.state_sequences import LayerStates

if TYPE_CHECKING:
    from moeflow.kernels.arrays import Device


class StateStorage:
    """The states of all recurrent layers, float32."""

    def __init__(self, config: RecurrentConfig, num_slots: int, device: Device) -> None:
        """Allocate zeros; `device` None is main memory. Raises: CapacityError if memory is short."""
        self.num_slots = num_slots
        self.num_bytes = num_slots * config.state_bytes
        self._places = {layer_idx: place for place, layer_idx in enumerate(config.layers)}
        shape = (len(config.layers), num_slots, config.mixer.state_values)
        with out_of_memory_as(
            f"{num_slots} states of recurrent layers need {format_bytes(self.num_bytes)}, which cannot be "
            "allocated; reduce the number of concurrent requests (--max-num-seqs)"
        ):
            slots = floats_on(device, *shape)
            slots[:] = 0.0  # written, so that the memory is taken now and not by some pass
        self.layers = tuple(LayerStates(layer) for layer in slots)

    @property
    def num_layers(self) -> int:
        """How many layers have states."""
        return len(self._places)

    @property
    def layer_bytes(self) -> int:
        """What one sequence's state takes in one layer."""
        return self.num_bytes // (self.num_slots * self.num_layers)

    def copy_out(self, number: int, slot: int, into: memoryview) -> None:
        """Copy a slot's `layer_bytes` in the layer of this number among those with states."""
        np.frombuffer(into, np.float32)[...] = self._state(number, slot)

    def copy_in(self, number: int, slot: int, content: memoryview) -> None:
        """Write what `copy_out` gave."""
        self._state(number, slot)[...] = np.frombuffer(content, np.float32)

    def _state(self, number: int, slot: int) -> NDArray[np.float32]:
        return np.asarray(self.layers[number].slots[slot])

    def layer(self, layer_idx: int) -> LayerStates:
        """Return the states of the model's layer of this number."""
        return self.layers[self._places[layer_idx]]
