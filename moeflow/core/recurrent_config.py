"""What recurrent layers are made of: they keep a state of a sequence, as large whatever its length, instead of keys and
values.

Each kind of mixer says what of a model's budget it takes; `models/layers/` computes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

STATE_BYTES = 4  # of one number: states are float32


class MixerConfig(Protocol):
    """What mixes the tokens of a sequence in a layer, between an input and an output projection."""

    @property
    def in_features(self) -> int:
        """What the input projection makes of a token's hidden state."""

    @property
    def out_features(self) -> int:
        """What goes into the output projection."""

    @property
    def state_values(self) -> int:
        """Numbers of a sequence's state in one layer."""

    @property
    def small_values(self) -> int:
        """Weights beside the projections, one-dimensional ones left out."""

    @property
    def flops_per_token(self) -> int:
        """Operations between the projections."""


@dataclass(frozen=True, slots=True)
class ShortConvConfig:
    """A gated convolution over each channel's last tokens (LFM2): the state is the inputs that are still to be seen."""

    num_channels: int
    kernel_size: int  # tokens that a channel sees, the newest included
    has_bias: bool = False

    @property
    def in_features(self) -> int:
        """See `MixerConfig`: a gate before, a gate behind, and what is gated."""
        return 3 * self.num_channels

    @property
    def out_features(self) -> int:
        """See `MixerConfig`."""
        return self.num_channels

    @property
    def state_values(self) -> int:
        """See `MixerConfig`."""
        return (self.kernel_size - 1) * self.num_channels

    @property
    def small_values(self) -> int:
        """See `MixerConfig`."""
        return self.kernel_size * self.num_channels

    @property
    def flops_per_token(self) -> int:
        """See `MixerConfig`."""
        return 2 * (self.kernel_size + 1) * self.num_channels


@dataclass(frozen=True, slots=True)
class RecurrentConfig:
    """The recurrent layers of a model, which are alike."""

    layers: tuple[int, ...]  # their numbers, ascending; all others attend
    mixer: MixerConfig

    @property
    def state_bytes(self) -> int:
        """What one sequence's state takes over all layers."""
        return len(self.layers) * self.mixer.state_values * STATE_BYTES

    def projection_values(self, hidden_size: int) -> int:
        """Return the weights of one layer's input and output projections."""
        return hidden_size * (self.mixer.in_features + self.mixer.out_features)
