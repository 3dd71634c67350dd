"""Reads ahead what an encoder will need of its inputs, as tables say that a lane beside the passes builds.

The encoder's own routers choose which experts compute, so no answer changes; unless `LossyRouting` has the same tables
choose.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moeflow.core.batch import Batch
from moeflow.core.request import Request
from moeflow.core.trial import Trial
from moeflow.engine.followed_texts import in_order_of_need
from moeflow.engine.governed_forecast import GovernedForecast
from moeflow.engine.input_tables import ExpertTable, InputTables
from moeflow.experts.cache.expert_cache import ExpertCache


class InputForecast(GovernedForecast):
    """Prefetches for the passes that encode inputs, while the trial allows it."""

    def __init__(self, tables: InputTables, cache: ExpertCache, trial: Trial) -> None:
        """Take the tables, whose lane `close` ends."""
        super().__init__(cache, trial)
        self._tables = tables

    def expect(self, request: Request) -> None:
        """Have the table of a request's input built, which waits for its pass."""
        if self.trial.is_on:
            self._tables.expect(request)

    def begin_pass(self, batch: Batch) -> None:
        """Start reading what the pass's inputs will probably need, then what those that wait will.

        Blocks: until the tables of the pass's inputs are there.
        """
        self._before = None
        self._tables.begin_pass(batch)
        if not self._tables.num_inputs:
            return
        self._before = self._cache.stats()
        if self.trial.is_on:
            now = self._ranked(self._tables.of_pass())
            then = self._ranked(self._tables.of_waiting())
            self._cache.prefetch_pass(list(dict.fromkeys([*now, *then])))

    def close(self) -> None:
        """End the lane. Blocks: until it is through with the input that it is at."""
        self._tables.close()

    def _ranked(self, tables: Sequence[ExpertTable]) -> list[int]:
        """Return numbers over all layers, in order; of a layer those first that are likely for more tokens."""
        shape = self._tables.shape
        wanted = torch.zeros(shape.num_layers, shape.num_experts)
        for table in tables:
            by_layer = (of.transpose(0, 1).flatten(1) for of in (table.experts, table.alpha))
            wanted.scatter_add_(-1, *by_layer)
        return in_order_of_need(wanted)
