"""Ranks experts layer by layer, by a predictor that sees the choices of routers (`experts/predict/`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from moeflow.core.trial import Trial
from moeflow.experts.predict.predictor import MAX_TOKENS, Predictor
from moeflow.experts.prefetch.network_source import Network
from moeflow.experts.prefetch.source import PassT, Source, numbered
from moeflow.kernels.cpu.decoder import NOTHING, Expected
from moeflow.kernels.on_demand import torch


class LayerSource(Source[PassT]):
    """Ranks the experts of the layers that follow, for passes of few tokens."""

    def __init__(
        self,
        trial: Trial,
        num_experts: int,
        predictor: Predictor,
        network: Network[PassT] | None = None,
        *,
        max_tokens: float = MAX_TOKENS,
    ) -> None:
        """`network` is for a predictor that weighs its ranking with others."""
        super().__init__(trial, num_experts, max_tokens=max_tokens)
        self._predictor, self._network = predictor, network

    def rank_pass(self, batch: PassT) -> Sequence[int]:
        """See `Source`. Only a predictor with a network ranks whole passes."""
        if self._network is None or (named := self._network(batch)) is None:
            return ()
        self._predictor.expect(named)
        return numbered(self._of_all_layers(), self._num_experts)

    def observe(self, layer: int, expert_ids: Sequence[int]) -> None:
        """See `Source`."""
        self._predictor.observe(layer, expert_ids)

    def rank_layers(self, layer: int, num_tokens: int, hidden: Any) -> Iterator[tuple[int, Sequence[int]]]:
        """See `Source`. After a layer that kernels ran alone, only the next pass still has to be ranked."""
        if num_tokens > self._max_tokens or (hidden is None and layer + 1 < self._predictor.num_layers):
            return
        if hidden is not None:
            self._predictor.observe_input(layer, hidden)
        for later in self._predictor.due(layer):
            yield later, self._predictor.predict(later)

    def expected(self, num_tokens: int) -> Expected:
        """See `Source`: kernels ask routers themselves, other predictors are asked about all layers here."""
        if num_tokens > self._max_tokens:
            return NOTHING
        if self._predictor.routers_ahead:
            return Expected(routers_ahead=self._predictor.routers_ahead)
        predicted = torch.zeros(self._predictor.num_layers, self._num_experts, dtype=torch.uint8)
        for layer, experts in enumerate(self._of_all_layers()):
            predicted[layer, experts] = 1
        return Expected(predicted=predicted)

    def _of_all_layers(self) -> Iterator[list[int]]:
        return (self._predictor.predict(layer) for layer in range(self._predictor.num_layers))
