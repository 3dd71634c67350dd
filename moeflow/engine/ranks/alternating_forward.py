"""The forward pass of a rank that computes one half of the tokens while the other half waits for other ranks.

A row's result is the same bits in any batch, so tokens do not depend on the cut. Each half reads the weights, and
waits are shorter by the work of the other half. So it is for long prompts and slow links.

Keys and values of the first half are there when the second one needs them: it is one collective behind in each layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from moeflow.kernels.arrays import rows_of
from moeflow.kernels.on_demand import torch, without_gradients
from moeflow.kv.storage import KVStorage
from moeflow.models.pass_input import PassInput
from moeflow.parallel.alternating_group import AlternatingGroup

if TYPE_CHECKING:
    from moeflow.models.language_model import LanguageModel


class AlternatingForward:
    """A `Forward` of all layers."""

    def __init__(self, model: LanguageModel, kv: KVStorage, group: AlternatingGroup, least_tokens: int) -> None:
        """Cut passes of at least so many tokens."""
        self._model, self._kv, self._group, self._least_tokens = model, kv, group, least_tokens

    def num_micro_batches(self, num_tokens: int) -> int:
        """See `Forward`."""
        return 2 if num_tokens >= self._least_tokens else 1

    def run(self, given: PassInput) -> Iterator[Tensor]:
        """See `Forward`. Raises: GroupError."""
        pieces = [partial(self._run_piece, piece) for piece in given.micro_batches()]
        found = [pieces[0]()] if len(pieces) == 1 else self._group.run(*pieces)
        return given.results(torch.cat(found))

    def close(self) -> None:
        """End the thread of second halves."""
        self._group.close()

    @without_gradients
    def _run_piece(self, piece: PassInput) -> Tensor:
        (rows,) = piece.logit_rows
        return rows_of(self._model(*piece.tensors(self._kv, torch.device("cpu"))), rows)
