"""What recurrent layers are made of: they keep a state of a sequence, as large whatever its length, instead of keys and
values.

Each kind of mixer states its share of a model's budget; `models/layers/` computes it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Protocol

STATE_BYTES = 4  # of one number: states are float32
MAX_TAPS: Final = 16  # of a convolution, in the kernels,
MAX_KEY_DIM: Final = 256  # and of a head's keys


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
        """Weights other than projections, without one-dimensional ones."""

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
        """See `MixerConfig`: the gate before, the gate after, and the gated values."""
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
class GatedDeltaConfig:
    """Linear attention by the gated delta rule (2412.06464) behind a short convolution."""

    num_heads: int  # of values
    num_key_heads: int  # of queries and keys, each for as many heads
    key_dim: int
    value_dim: int
    kernel_size: int  # tokens that a channel of the convolution sees, the newest included
    key_heads_take_turns: bool = False  # heads that share a key are not neighbours: their keys are 0, 1, .., 0, 1, ..

    @property
    def values_size(self) -> int:
        """Numbers of all heads' values."""
        return self.num_heads * self.value_dim

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        """Numbers of a token's queries, keys and values."""
        return self.num_key_heads * self.key_dim, self.num_key_heads * self.key_dim, self.values_size

    @property
    def conv_size(self) -> int:
        """Channels of the convolution."""
        return sum(self.qkv_sizes)

    @property
    def conv_state_values(self) -> int:
        """Numbers of a state that the convolution has; the heads' matrices follow."""
        return (self.kernel_size - 1) * self.conv_size

    @property
    def in_features(self) -> int:
        """See `MixerConfig`: inputs of the convolution, gates of the results, a rate and a step of each head."""
        return self.conv_size + self.values_size + 2 * self.num_heads

    @property
    def out_features(self) -> int:
        """See `MixerConfig`."""
        return self.values_size

    @property
    def state_values(self) -> int:
        """See `MixerConfig`."""
        return self.conv_state_values + self.values_size * self.key_dim

    @property
    def small_values(self) -> int:
        """See `MixerConfig`."""
        return self.kernel_size * self.conv_size

    @property
    def flops_per_token(self) -> int:
        """See `MixerConfig`: fading, remembering, adding and finding in each matrix."""
        return 2 * self.kernel_size * self.conv_size + 7 * self.values_size * self.key_dim


@dataclass(frozen=True, slots=True)
class Mamba2Config:
    """A state space model of heads with one decay each (2405.21060) behind a short convolution.

    In the words of linear attention: C are queries, B keys, each of a group of neighbouring heads, and x values.
    """

    num_heads: int
    num_groups: int  # of heads; results are normalised for each, too
    state_dim: int  # of queries and keys
    head_dim: int  # of values
    kernel_size: int  # tokens that a channel of the convolution sees, the newest included
    norm_eps: float  # of results
    has_conv_bias: bool = True
    has_bias: bool = False  # of the projections
    least_step: float = 0.0
    most_step: float = math.inf

    @property
    def values_size(self) -> int:
        """Numbers of all heads' values."""
        return self.num_heads * self.head_dim

    @property
    def xbc_sizes(self) -> tuple[int, int, int]:
        """Numbers of a token's values, keys and queries."""
        return self.values_size, self.num_groups * self.state_dim, self.num_groups * self.state_dim

    @property
    def conv_size(self) -> int:
        """Channels of the convolution."""
        return sum(self.xbc_sizes)

    @property
    def conv_state_values(self) -> int:
        """Numbers of a state that the convolution has; the heads' matrices follow."""
        return (self.kernel_size - 1) * self.conv_size

    @property
    def in_features(self) -> int:
        """See `MixerConfig`: gates of the results, inputs of the convolution, a step of each head."""
        return self.values_size + self.conv_size + self.num_heads

    @property
    def out_features(self) -> int:
        """See `MixerConfig`."""
        return self.values_size

    @property
    def state_values(self) -> int:
        """See `MixerConfig`."""
        return self.conv_state_values + self.values_size * self.state_dim

    @property
    def small_values(self) -> int:
        """See `MixerConfig`."""
        return self.kernel_size * self.conv_size

    @property
    def flops_per_token(self) -> int:
        """See `MixerConfig`: fading, adding and finding in each matrix."""
        return 2 * self.kernel_size * self.conv_size + 5 * self.values_size * self.state_dim


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
