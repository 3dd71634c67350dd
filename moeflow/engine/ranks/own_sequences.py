"""The forward pass of a rank that has sequences of its own: it attends to them alone, and ranks share the experts.

All ranks get the numbers of the whole pass. They assign sequences to ranks alike, without messages. A sequence keeps
its rank as long as it keeps its KV blocks, because only that rank has its keys and values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from moeflow.core.model_config import ModelConfig
from moeflow.kernels.arrays import rows_of
from moeflow.kv.storage import KVStorage
from moeflow.models.language_model import LanguageModel
from moeflow.models.layers.ranks.own_tokens import TokenRounds
from moeflow.models.pass_input import PassInput

_DEVICE = torch.device("cpu")  # ranks compute with the CPU kernels


class SequenceOwners:
    """Which rank has which sequences, the same on all ranks."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._ranks: dict[int, int] = {}  # by a sequence's first KV block, which no other sequence has

    def of(self, given: PassInput) -> list[int]:
        """Return the rank of each sequence of a pass; new ones go to the rank with the fewest tokens."""
        first_blocks = [block_ids[0] for block_ids in given.block_ids]
        ranks = [self._ranks[block] if start else -1 for block, start in zip(first_blocks, given.starts, strict=True)]
        num_tokens = [0] * self._num_ranks
        for rank, number in zip(ranks, given.num_tokens, strict=True):
            if rank >= 0:
                num_tokens[rank] += number
        for place, number in sorted(enumerate(given.num_tokens), key=lambda it: -it[1]):
            if ranks[place] < 0:
                ranks[place] = self._ranks[first_blocks[place]] = num_tokens.index(min(num_tokens))
                num_tokens[ranks[place]] += number
        return ranks


class OwnSequencesForward:
    """A `Forward` of this rank's sequences, whose results all ranks have."""

    def __init__(self, model: LanguageModel, kv: KVStorage, rounds: TokenRounds) -> None:
        """Take a model whose experts are in these rounds."""
        self.rounds = rounds
        self.row_order: Tensor | None = None  # [T], of the last pass whose choices were reported: its rows by rank
        self._model, self._kv = model, kv
        self._like = torch.empty(0, model.config.hidden_size, dtype=model.dtype)
        self._owners = SequenceOwners(rounds.group.size)

    def num_micro_batches(self, num_tokens: int) -> int:
        """See `Forward`: one, since all ranks compute at the same time."""
        return 1

    @torch.inference_mode()
    def run(self, given: PassInput) -> Iterator[Tensor]:
        """See `Forward`. Blocks: until the other ranks are through, too."""
        group, owners = self.rounds.group, self._owners.of(given)
        own = given.of_sequences([place for place, owner in enumerate(owners) if owner == group.rank])
        if self.rounds.on_choices is not None:
            self.row_order = torch.tensor(_rows_by_rank(given, owners, range(len(given.token_ids))))
        self.rounds.begin(_layers_with_tokens(given, self._model.config, self._kv.block_size))
        hidden = self._model(*own.tensors(self._kv, _DEVICE)) if own.token_ids else self._like
        self.rounds.end()
        results = rows_of(hidden, own.result_rows())
        return self._in_groups(given, owners, group.all_gather("results", results))

    def close(self) -> None:
        """See `Forward`: there are none."""

    def _in_groups(self, given: PassInput, owners: list[int], results: list[Tensor]) -> Iterator[Tensor]:
        """Yield the hidden states of each group of rows, from those of each rank's rows, which ascend."""
        by_rank = torch.tensor(_rows_by_rank(given, owners, given.result_rows()), dtype=torch.int64)
        hidden = torch.cat(results)[by_rank.argsort()]
        return given.results(hidden)


def _rows_by_rank(given: PassInput, owners: list[int], rows: Sequence[int]) -> list[int]:
    """Return rows of a pass, ascending within each rank, and rank by rank."""
    rank_of = [owner for owner, number in zip(owners, given.num_tokens, strict=True) for _ in range(number)]
    return sorted(rows, key=lambda row: (rank_of[row], row))


def _layers_with_tokens(given: PassInput, shape: ModelConfig, block_size: int) -> range:
    """Return the layers with experts that a pass runs, an encoder's first."""
    if shape.encoder is None:
        return range(shape.num_moe_layers)
    num_encoding = shape.num_encoder_moe_layers
    inputs = zip(given.num_encoder_tokens, given.starts, given.num_tokens, strict=True)
    has_outputs = any(start + number > -(-length // block_size) * block_size for length, start, number in inputs)
    return range(
        0 if 0 in given.starts else num_encoding,
        shape.num_moe_layers if has_outputs else num_encoding,
    )
