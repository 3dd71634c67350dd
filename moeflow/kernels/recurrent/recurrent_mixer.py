"""What mixes the tokens of a layer that keeps a state: a short convolution, and perhaps a linear recurrence behind it.

It takes a row of each token, what the layer projects, and finds its inputs at places in that.
"""

from __future__ import annotations

from dataclasses import dataclass

from moeflow.kernels.arrays import Array
from moeflow.kernels.recurrent.recurrence_layer import RecurrenceLayer


@dataclass(frozen=True, slots=True, eq=False)
class MixerHeads:
    """Heads with a matrix state each over the convolved inputs, and a gated norm of their outputs."""

    layer: RecurrenceLayer
    queries_at: int  # places of the convolved inputs,
    keys_at: int
    values_at: int
    steps_at: int  # and of the projection
    rates_at: int | None  # None: steps are rates, too
    norm: Array  # [groups, D] float32, or [1, D] for all groups
    norm_eps: float
    norm_gates_at: int  # of the projection
    is_gated_first: bool  # before the norm, else behind it

    @property
    def out_size(self) -> int:
        """Values of a token that are found."""
        return self.layer.num_heads * self.layer.value_dim


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentMixer:
    """The weights of one layer's mixer; its state is that of the convolution, then that of the heads."""

    in_size: int  # values of a token that it takes
    conv_weight: Array  # [C, taps], that of the newest input last
    conv_bias: Array | None  # [C]
    conv_at: int = 0
    conv_gates_at: tuple[int, int] | None = None  # of C values each, before and behind
    has_silu: bool = False
    heads: MixerHeads | None = None  # None: the convolution is the result

    @property
    def num_channels(self) -> int:
        """C."""
        return self.conv_weight.shape[0]

    @property
    def conv_state_values(self) -> int:
        """Numbers of a state that the convolution has."""
        return self.num_channels * (self.conv_weight.shape[1] - 1)

    @property
    def state_values(self) -> int:
        """Numbers of a state."""
        return self.conv_state_values + (0 if self.heads is None else self.heads.layer.state_values)

    @property
    def out_size(self) -> int:
        """Values of a token that it returns."""
        return self.num_channels if self.heads is None else self.heads.out_size
