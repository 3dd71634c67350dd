"""The memory that states of recurrent layers live in: slots of one size, all of it taken at once.

Which request or prefix has which slot is not known here (`state_slots.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moeflow.core.errors import CapacityError
from moeflow.core.recurrent_config import RecurrentConfig
from moeflow.core.units import format_bytes
from moeflow.kernels.on_demand import torch
from moeflow.kernels.recurrent.state_sequences import LayerStates

if TYPE_CHECKING:
    from torch import Tensor


class StateStorage:
    """The states of all recurrent layers, float32."""

    def __init__(self, config: RecurrentConfig, num_slots: int) -> None:
        """Allocate zeros in main memory. Raises: CapacityError if it lacks room."""
        self.num_slots = num_slots
        self.num_bytes = num_slots * config.state_bytes
        self._places = {layer_idx: place for place, layer_idx in enumerate(config.layers)}
        try:
            # Written, so that the memory is taken now and not by some pass.
            self._slots: Tensor = torch.full((len(config.layers), num_slots, config.mixer.state_values), 0.0)
        except RuntimeError as error:
            raise CapacityError(
                f"{num_slots} states of recurrent layers need {format_bytes(self.num_bytes)}, which cannot be "
                "allocated; have fewer requests run together (--max-num-seqs)"
            ) from error

    def layer(self, layer_idx: int) -> LayerStates:
        """Return the states of the model's layer of this number."""
        return LayerStates(self._slots[self._places[layer_idx]])
