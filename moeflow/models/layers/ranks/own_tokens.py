"""A layer's experts where every rank has tokens of its own: ranks exchange tokens, compute all, and return the results.

Algorithm 1 of the sliced experts paper, for slices and for whole experts. Attention, norms and routers run over a
rank's own sequences. Every token travels once, with its experts and their weights, so ranks need no counts of experts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from moeflow.models.layers.expert_weights import Destination, ExpertWeights

if TYPE_CHECKING:
    from moeflow.models.layers.allocation.expert_homes import ExpertHome, PackedSpec
    from moeflow.parallel.group import Group


class SharedExperts(ExpertWeights, Protocol):
    """A layer's experts, shared by several ranks."""

    def own_sums(self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, num_tokens: Sequence[int]) -> Tensor:
        """Return the weighted sums of this rank's tokens, given the tokens of all ranks.

        `num_tokens` counts the tokens of each rank. Shapes: hidden [T, H], topk_ids and topk_weights [T, K] ->
        [own T, H]. Blocks: until the other ranks are through, too. Raises: GroupError.
        """


class TokenRounds:
    """The layers with experts that a pass runs: each is a round of exchanges that all ranks join, in order."""

    def __init__(self, group: Group, hidden_size: int, top_k: int) -> None:
        """Take the ranks, and the sizes of a token and of its choice."""
        self.group = group
        # Receives the choices of a layer with experts, [T, K] of the tokens of all ranks, rank by rank.
        self.on_choices: Callable[[int, Tensor], None] | None = None
        self._nothing = torch.empty(0, hidden_size), torch.empty(0, top_k, dtype=torch.int64), torch.empty(0, top_k)
        self._layers: list[OwnTokens] = []
        self._coming: deque[int] = deque()

    def add_layer(self, experts: SharedExperts) -> OwnTokens:
        """Return the next layer's experts."""
        self._layers.append(OwnTokens(experts, len(self._layers), self))
        return self._layers[-1]

    def begin(self, layers: Iterable[int]) -> None:
        """Begin a pass. For each of these layers, ascending, at least one rank has tokens."""
        self._coming = deque(layers)

    def join_up_to(self, layer: int) -> None:
        """Join the rounds before a layer's, where this rank has no tokens. Raises: GroupError."""
        while (earlier := self._coming.popleft()) != layer:
            self._layers[earlier].exchange(*self._nothing)

    def end(self) -> None:
        """Join all rounds that are left. Raises: GroupError."""
        while self._coming:
            self._layers[self._coming.popleft()].exchange(*self._nothing)


class OwnTokens(ExpertWeights):
    """One layer's experts, for this rank's tokens."""

    def __init__(self, experts: SharedExperts, layer: int, rounds: TokenRounds) -> None:
        """Take the experts of that layer with experts."""
        self._experts, self._layer, self._rounds = experts, layer, rounds
        self._name = f"of MoE layer {layer}"

    def compute(self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, residual: Tensor | None = None) -> Tensor:
        """See `ExpertWeights`. Blocks: until the other ranks are through, too. Raises: GroupError."""
        self._rounds.join_up_to(self._layer)
        sums = self.exchange(hidden, topk_ids, topk_weights)
        return sums if residual is None else sums + residual

    def exchange(self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """Return the weighted sums of this rank's tokens. Shapes: [T, H], [T, K], [T, K] -> [T, H]."""
        group = self._rounds.group
        choices = torch.cat([topk_ids.int(), topk_weights.view(torch.int32)], dim=1)
        all_ids, all_weights = torch.cat(group.all_gather(f"choices {self._name}", choices)).chunk(2, dim=1)
        if self._rounds.on_choices is not None:
            self._rounds.on_choices(self._layer, all_ids)
        rows = group.all_gather(f"tokens {self._name}", hidden)
        weights = all_weights.contiguous().view(torch.float32)
        return self._experts.own_sums(torch.cat(rows), all_ids.long(), weights, [len(part) for part in rows])

    def parts(self) -> Sequence[tuple[Destination, ...] | None]:
        """See `ExpertWeights`."""
        return self._experts.parts()


class OwnTokensHome:
    """Experts of another home on ranks, for tokens that each rank has of its own."""

    def __init__(self, home: ExpertHome, rounds: TokenRounds) -> None:
        self._home, self._rounds = home, rounds

    def place(self, experts: PackedSpec) -> ExpertWeights:
        """See `ExpertHome.place`."""
        return self._rounds.add_layer(self._home.place(experts))  # type: ignore[arg-type]  # homes on ranks share them
