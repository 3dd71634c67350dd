"""The weights of a convolution of each channel by itself."""

from __future__ import annotations

from collections.abc import Iterator

from moeflow.kernels.arrays import Array
from moeflow.models.layers.expert_weights import Destination
from moeflow.models.layers.weight_allocator import WeightAllocator


class ConvWeights:
    """A weight for each channel and tap, and perhaps a bias for each channel."""

    def __init__(self, allocator: WeightAllocator, num_channels: int, num_taps: int, *, bias: bool) -> None:
        self._stored: Array = allocator.empty(num_channels, 1, num_taps)  # as torch's Conv1d has it
        self.bias: Array | None = allocator.empty(num_channels) if bias else None

    @property
    def weight(self) -> Array:
        """[C, taps], that of the newest input last."""
        return self._stored.squeeze(1)

    def named_weights(self, prefix: str) -> Iterator[tuple[str, Destination]]:
        """Yield (checkpoint name, destination)."""
        yield f"{prefix}.weight", self._stored
        if self.bias is not None:
            yield f"{prefix}.bias", self.bias
