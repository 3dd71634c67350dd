"""What lets a layer's tokens see those before them: attention, or what keeps a state of the sequence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from moeflow.kernels.cpu.packed_layer import PackedAttention
from moeflow.kernels.on_demand import torch
from moeflow.kernels.rotary import RotaryTable
from moeflow.models.layers.context import ForwardContext
from moeflow.models.layers.expert_weights import Destination
from moeflow.models.layers.linear import Linear

if TYPE_CHECKING:
    from torch import Tensor

    from moeflow.kernels.recurrent.recurrent_mixer import RecurrentMixer


class TokenMixer(Protocol):
    """Three stages: an input projection of the normalised hidden states, mixing, an output projection."""

    @property
    def in_proj(self) -> Linear:
        """From hidden states to the mixer's inputs: [T, H] -> [T, P]."""

    @property
    def out_proj(self) -> Linear:
        """From the mixer's result to the residual stream: [T, M] -> [T, H]."""

    @property
    def order(self) -> Sequence[range]:
        """Places of the mixer's inputs in the projection; empty: all of it."""

    def mix(self, projected: Tensor, rotary: Sequence[RotaryTable], context: ForwardContext) -> Tensor:
        """Have tokens see those before them, and keep what later ones need; `projected` is used up.

        Shapes: projected [T, P] -> [T, M].
        """

    def for_kernels(self) -> PackedAttention | RecurrentMixer | None:
        """Return what mixes for the CPU kernels, if they can take these weights."""

    def matrix_names(self, prefix: str) -> dict[str, list[str]]:
        """Return the checkpoint names of the matrices that each field of `LayerFormats` is about."""

    def named_weights(self, prefix: str) -> Iterator[tuple[str, Destination]]:
        """Yield (checkpoint name, destination)."""


def in_order(projected: Tensor, order: Sequence[range]) -> Tensor:
    """Return the mixer's result for the projected inputs. Shapes: [T, P] -> [T, P]."""
    return torch.cat([projected.narrow(1, part.start, len(part)) for part in order], dim=1) if order else projected
