"""The forward pass of a rank that has one stage of the layers: micro-batches come, go through them, and go on.

The first stage embeds tokens. The last stage returns the hidden states for logits after all micro-batches, so no two
stages wait for each other. For a pass without sampling, such as a piece of a long prompt, it gets none. It begins the
next pass while later stages still compute.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from moeflow.core.parallel_config import ParallelConfig, StageConfig
from moeflow.kernels.arrays import rows_of
from moeflow.kv.storage import KVStorage
from moeflow.models.layers.context import ForwardContext
from moeflow.models.layers.decoder import CausalLM
from moeflow.models.pass_input import PassInput
from moeflow.parallel.group import Group
from moeflow.parallel.stages import neighbours
from moeflow.planner.costs.micro_batches import num_micro_batches

_DEVICE = torch.device("cpu")  # ranks compute with the CPU kernels


class StageForward:
    """A `Forward` whose results only the ranks of the first stage have: those of others have none."""

    def __init__(
        self, model: CausalLM, kv: KVStorage, group: Group, parallel: ParallelConfig, stages: StageConfig
    ) -> None:
        """Take the layers of this rank's stage and the group of all ranks."""
        self._model, self._kv = model, kv
        stage = group.rank // parallel.ranks_per_stage
        self._is_first, self._is_last = stage == 0, stage == parallel.num_stages - 1
        self._before, self._after = (group.channel(rank) for rank in neighbours(parallel, group.rank))
        self._like = torch.empty(0, model.config.hidden_size, dtype=model.dtype)
        self._input_size = (
            0 if model.config.embeddings.layer_embeddings is None else model.config.embeddings.layer_embeddings.size
        )
        num_coming = (model.config.num_layers - model.first_layer) * self._input_size
        self._coming = torch.empty(0, model.config.hidden_size + num_coming, dtype=model.dtype)
        self.num_micro_batches = lru_cache(lambda tokens: num_micro_batches(tokens, parallel.num_stages, stages.costs))

    @torch.inference_mode()
    def run(self, given: PassInput) -> Iterator[Tensor]:
        """See `Forward`. Blocks: until the stages before are there, and on the first one all; if it has results."""
        found = [self._run_layers(piece, label) for label, piece in _labelled(given)]
        if not given.result_rows() or not (self._is_first or self._is_last):
            return iter(())
        if self._is_last:
            self._after.send("results", torch.cat(found))
            return iter(())
        return given.results(self._model.norm(self._before.receive("results", self._like)))

    def close(self) -> None:
        """See `Forward`: there are none."""

    def _run_layers(self, piece: PassInput, label: str) -> Tensor:
        """Run this stage's layers over a micro-batch; return what results are made of, if this is the last: [n, H]."""
        token_ids, context = piece.tensors(self._kv, _DEVICE)
        if self._is_first:
            hidden, context = self._model.begin(token_ids, context)
        else:
            hidden, context = self._unpacked(self._before.receive(label, self._coming), context)
        hidden = self._model.run_layers(hidden, context)
        if not self._is_last:
            self._after.send(label, self._with_inputs(hidden, context))
            return self._like
        (rows,) = piece.logit_rows
        return rows_of(hidden, rows)

    def _unpacked(self, coming: Tensor, context: ForwardContext) -> tuple[Tensor, ForwardContext]:
        """Return hidden states, and the context with what layers from here on get besides, if they get something."""
        if not self._input_size:
            return coming, context
        size = self._like.shape[1]
        hidden, inputs = coming[:, :size], coming[:, size:]
        by_layer = inputs.contiguous().reshape(len(coming), -1, self._input_size)
        return hidden.contiguous(), replace(context, layer_inputs=by_layer)

    def _with_inputs(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        """Return what the next stage gets: hidden states, and what its layers and later ones get besides."""
        inputs = context.layer_inputs
        return hidden if inputs is None else torch.cat([hidden, inputs[:, len(self._model.layers) :].flatten(1)], dim=1)


def _labelled(given: PassInput) -> Iterator[tuple[str, PassInput]]:
    pieces = given.micro_batches()
    for number, piece in enumerate(pieces, 1):
        yield f"hidden states of micro-batch {number} of {len(pieces)}", piece
