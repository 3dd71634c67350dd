"""The forward pass of a replica that has others compute experts: several micro-batches of it are in flight at once.

Each goes through all layers in a thread of its own, and the one that has the baton computes; while it waits for the
results of others, another one does. A row's result is the same bits in any batch, so tokens do not depend on the cut.

Source: the asynchronous runtime of ExpertFlow (3.2, 3.3), where each device has several batches in flight.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

import torch
from torch import Tensor

from moeflow.engine.in_flight_choice import MAX_IN_FLIGHT, InFlightChoice
from moeflow.kernels.arrays import rows_of
from moeflow.kernels.interrupts import hold_interrupts
from moeflow.kv.storage import KVStorage
from moeflow.models.layers.decoder import CausalLM
from moeflow.models.layers.expert_shares import ExpertShares
from moeflow.models.pass_input import PassInput

_DEVICE = torch.device("cpu")  # replicas that share experts compute with the CPU kernels


class InFlightForward:
    """A `Forward` that cuts passes by sequences, into as many micro-batches as were shortest so far."""

    def __init__(self, model: CausalLM, kv: KVStorage, shares: ExpertShares, choice: InFlightChoice) -> None:
        self._model, self._kv, self._shares = model, kv, shares
        self._choice = choice
        self._threads = ThreadPoolExecutor(MAX_IN_FLIGHT, "micro-batch")

    def num_micro_batches(self, num_tokens: int) -> int:
        """See `Forward`: one, as these would compute one after another; `run` cuts by sequences."""
        return 1

    @torch.inference_mode()
    def run(self, given: PassInput) -> Iterator[Tensor]:
        """See `Forward`. Blocks: until other replicas have answered, or are given up."""
        hidden = self._run_measured(given) if self._shares.has_peers else self._run([given])
        return (rows_of(hidden, rows) for rows in given.row_groups())

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()

    def _run_measured(self, given: PassInput) -> Tensor:
        num_tokens, num_sequences = len(given.token_ids), len(given.starts)
        bounds = given.independent_bounds(self._kv.block_size)
        pieces = given.cut(bounds, self._choice.choose(num_tokens, num_sequences, len(bounds) + 1))
        start_s = time.perf_counter()
        hidden = self._run(pieces)
        self._choice.note(num_tokens, num_sequences, len(pieces), time.perf_counter() - start_s)
        return hidden

    def _run(self, pieces: Sequence[PassInput]) -> Tensor:
        """Return the hidden states of all pieces' tokens, [T, H]. Ctrl-C waits: they write to the KV cache."""
        if len(pieces) == 1:
            return self._run_piece(pieces[0])
        with hold_interrupts():
            running = [self._threads.submit(self._run_piece, piece) for piece in pieces]
            wait(running)
        return torch.cat([each.result() for each in running])

    @torch.inference_mode()
    def _run_piece(self, piece: PassInput) -> Tensor:
        with self._shares.baton.computing():
            return self._model(*piece.tensors(self._kv, _DEVICE))
