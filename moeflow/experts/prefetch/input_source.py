"""Ranks the experts of an encoder's inputs, by tables that a thread builds while the inputs wait."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moeflow.core.batch import Batch
from moeflow.core.request import Request
from moeflow.core.trial import Trial
from moeflow.experts.prefetch.expert_tables import ExpertTable, ExpertTables
from moeflow.experts.prefetch.followed_texts import ranked_by_layer
from moeflow.experts.prefetch.source import Source, numbered


class InputSource(Source[Batch]):
    """Ranks experts for the passes that encode inputs: first those of the pass, then those of waiting inputs."""

    def __init__(self, trial: Trial, num_experts: int, tables: ExpertTables) -> None:
        """Take the tables, which `close` closes."""
        super().__init__(trial, num_experts)
        self._tables = tables

    def expect(self, request: Request) -> None:
        """See `Source`: begin the table of the request's input."""
        self._tables.expect(request)

    def begin_pass(self, batch: Batch) -> bool:
        """See `Source`."""
        self._tables.begin_pass(batch)
        return self._tables.num_inputs > 0

    def rank_pass(self, batch: Batch) -> Sequence[int]:
        """See `Source`. Blocks: until the tables of the pass's inputs are complete."""
        now, then = self._ranked(self._tables.of_pass()), self._ranked(self._tables.of_waiting())
        return list(dict.fromkeys([*now, *then]))

    def close(self) -> None:
        """See `Source`."""
        self._tables.close()

    def _ranked(self, tables: Sequence[ExpertTable]) -> list[int]:
        """Return the tables' experts layer by layer, in each layer by the sum of their probabilities."""
        if not tables:
            return []
        wanted = torch.zeros(tables[0].experts.shape[1], self._num_experts)
        for table in tables:
            by_layer = (of.transpose(0, 1).flatten(1) for of in (table.experts, table.alpha))
            wanted.scatter_add_(-1, *by_layer)
        return numbered(ranked_by_layer(wanted), self._num_experts)
