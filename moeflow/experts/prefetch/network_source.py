"""Ranks the experts of all layers before a pass begins, by a network that is trained for the model.

This is SiDA's hash function (2310.18859, section 3.1), but the model's own routers choose the experts that compute, so
answers stay the same. The trial counts the network's time as time of the pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from moeflow.core.trial import Trial
from moeflow.experts.prefetch.source import PassT, Source, numbered

# From a pass of few tokens to the experts of each layer, likeliest first. None: the network has nothing to predict.
Network: TypeAlias = Callable[[PassT], Sequence[Sequence[int]] | None]


class NetworkSource(Source[PassT]):
    """Ranks experts for passes of few tokens."""

    def __init__(self, trial: Trial, num_experts: int, network: Network[PassT], *, first_layer: int = 0) -> None:
        """The network's layers begin at `first_layer` of those with experts."""
        super().__init__(trial, num_experts)
        self._network, self._first_layer = network, first_layer

    def rank_pass(self, batch: PassT) -> Sequence[int]:
        """See `Source`. Blocks: while the network computes."""
        return numbered(self._network(batch) or (), self._num_experts, self._first_layer)
