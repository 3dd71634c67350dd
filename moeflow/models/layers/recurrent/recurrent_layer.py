"""A layer's mixer that keeps a state: projections on either side of a convolution and perhaps a recurrence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moeflow.kernels.on_demand import on_demand
from moeflow.kernels.recurrent.recurrent_mixer import RecurrentMixer
from moeflow.kernels.rotary import RotaryTable
from moeflow.models.layers.allocation.weight_formats import field_of
from moeflow.models.layers.context import ForwardContext
from moeflow.models.layers.linear import Linear
from moeflow.models.layers.token_mixer import in_order

if TYPE_CHECKING:
    from torch import Tensor

with on_demand(__name__):
    from moeflow.kernels.recurrent import mixing


class RecurrentLayer:
    """What kinds of such mixers have in common. Each lists its weights and their checkpoint names."""

    def __init__(self, layer_idx: int, in_proj: Linear, mixer: RecurrentMixer, out_proj: Linear) -> None:
        self.layer_idx = layer_idx
        self.in_proj = in_proj
        self._mixer = mixer
        self.out_proj = out_proj

    @property
    def order(self) -> Sequence[range]:
        """See `TokenMixer`."""
        return self.in_proj.order

    def mix(self, projected: Tensor, rotary: Sequence[RotaryTable], context: ForwardContext) -> Tensor:
        """See `TokenMixer`. Shapes: projected [T, P] -> [T, M]."""
        return mixing.mix(self._mixer, in_order(projected, self.order), *context.states_of(self.layer_idx))

    def for_kernels(self) -> RecurrentMixer:
        """See `TokenMixer`."""
        return self._mixer

    def matrix_names(self, prefix: str) -> dict[str, list[str]]:
        """See `TokenMixer`."""
        names: dict[str, list[str]] = {"q_proj": [], "k_proj": [], "v_proj": [], "o_proj": []}
        for part in (*self.in_proj.parts, *self.out_proj.parts):
            names[field_of(part)].append(f"{prefix}.{part}.weight")
        return {field: found or names["q_proj"] for field, found in names.items()}
