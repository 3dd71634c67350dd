"""Ranks the experts of all layers before a pass begins, by a network that is trained for the model.

This is SiDA's hash function (2310.18859, section 3.1), but the model's own routers choose the experts that compute, so
answers stay the same. The trial counts the network's time as time of the pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from moeflow.experts.predict.governor import Governor
from moeflow.experts.predict.predictor import MAX_TOKENS
from moeflow.experts.prefetch.source import PassT, Source, numbered

# From a pass of few tokens to the experts of each layer, likeliest first. None: the network has nothing to predict.
Network: TypeAlias = Callable[[PassT], Sequence[Sequence[int]] | None]


class NetworkSource(Source[PassT]):
    """Ranks experts for passes of few tokens."""

    def __init__(self, trial: Governor, network: Network[PassT], num_experts: int, *, first_layer: int = 0) -> None:
        """`num_experts` is the number in a layer; the network's layers begin at `first_layer` of those with experts."""
        super().__init__(trial)
        self._network, self._num_experts, self._first_layer = network, num_experts, first_layer

    def begin_pass(self, batch: PassT) -> bool:
        """See `Source`: reads on demand keep the disk busy in large passes."""
        return batch.num_tokens <= MAX_TOKENS

    def rank_pass(self, batch: PassT) -> Sequence[int]:
        """See `Source`. Blocks: while the network computes."""
        return numbered(self._network(batch) or (), self._num_experts, self._first_layer)
