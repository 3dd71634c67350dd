"""Predicts the experts of passes by a network that resumes each text where the last pass ended.

The network keeps a state of each text, so that a pass costs the same however long its texts are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Protocol, TypeAlias

import torch
from torch import Tensor

from moeflow.core.batch import Batch, BatchEntry
from moeflow.core.request import Request, RequestStatus

Embed: TypeAlias = Callable[[list[int]], Tensor]  # token ids -> their embeddings [T, H], float32 on the CPU
_PIECE_TOKENS: Final = 512  # of a text, for the network at once: attention takes their square in memory


class TextNetwork(Protocol):
    """A network over texts, as `models/expert_predictor/` trains it."""

    @property
    def shape(self) -> Any:
        """Sizes: `window`, the tokens that attention sees, and `top_k`, the experts of a token."""

    def begin(self) -> Any:
        """Return the state before the first token."""

    def go_on(self, embeddings: Tensor, states: Any, /) -> tuple[Tensor, Any]:
        """Return logits [B, T, layers, E] for embeddings [B, T, H] of the next tokens, and the states after them."""


@dataclass(frozen=True, slots=True)
class NewTokens:
    """The tokens of a text that a pass computes."""

    text: Hashable
    start: int  # position of the first of them
    stop: int  # one past the last
    token_ids: Callable[[int, int], list[int]]  # start, stop -> token ids of the text between two positions

    @classmethod
    def of(cls, entry: BatchEntry) -> NewTokens | None:
        """Return a request's new tokens, without drafted ones; None if its decoder computes none.

        The text is the encoder's input and the decoder's tokens, without the padding between them.
        """
        request = entry.request
        if not request.num_encoder_tokens:
            return cls(request, entry.start, entry.stop, request.token_ids)
        num_input, begin = request.num_encoder_tokens, request.num_together - 1  # with the first of the decoder's
        if entry.stop <= begin:
            return None
        skipped = begin - num_input

        def token_ids(start: int, stop: int) -> list[int]:
            own = request.token_ids(max(start, num_input) + skipped, stop + skipped)
            return request.token_ids(start, num_input) + own if start < num_input else own

        return cls(request, max(entry.start, begin) - skipped, entry.stop - skipped, token_ids)


@dataclass(frozen=True, slots=True)
class _Followed:
    """The network's state after the first tokens of a text."""

    num_tokens: int
    state: Any


class FollowedTexts:
    """The texts of requests, followed pass by pass."""

    def __init__(
        self, network: TextNetwork, embed: Embed, *, top_k: int | None = None, from_start: bool = False
    ) -> None:
        """`top_k` experts of a token are wanted; None: those of the model.

        With `from_start`, logits depend on the text alone, however passes divide it. A text that was not followed
        then costs the network all of its tokens.
        """
        self._network, self._embed = network, embed
        self._top_k, self._from_start = top_k or network.shape.top_k, from_start
        self._followed: dict[Hashable, _Followed] = {}
        self._batch: Batch | None = None  # of the last pass
        self._tokens: Sequence[NewTokens] = ()  # of it
        self._found: Tensor | None = None  # their logits; None: not computed yet

    def named_for(self, batch: Batch) -> list[list[int]] | None:
        """Return `named` of a pass's new tokens. Blocks: while the network computes."""
        return self.named(self._tokens_of(batch))

    @torch.inference_mode()
    def logits_for(self, batch: Batch) -> Tensor:
        """Return the network's logits for a pass's new tokens, in its order. Blocks: while the network computes.

        Shapes: -> [T, layers, E]; [0] if no token is new.
        """
        tokens = self._tokens_of(batch)
        return self._logits(tokens) if tokens else torch.empty(0)

    def named(self, tokens: Sequence[NewTokens]) -> list[list[int]] | None:
        """Return the experts of each layer that a pass probably needs, likeliest first; None if no token is new."""
        return ranked_by_layer(self.wanted(tokens)) if tokens else None

    @torch.inference_mode()
    def wanted(self, tokens: Sequence[NewTokens]) -> Tensor:
        """Return how much a pass wants each expert: for each token, its likeliest `top_k` count.

        Shapes: -> [layers, E] float32, sums of probabilities; 0: no token wants the expert.
        """
        probabilities = self._logits(tokens).softmax(-1)
        likeliest = probabilities.topk(self._top_k, dim=-1)
        return torch.zeros_like(probabilities).scatter_(-1, likeliest.indices, likeliest.values).sum(0)

    def forget_finished(self) -> None:
        """Forget the texts of finished requests."""
        self._followed = {
            text: followed
            for text, followed in self._followed.items()
            if not (isinstance(text, Request) and text.status is RequestStatus.FINISHED)
        }

    def _tokens_of(self, batch: Batch) -> Sequence[NewTokens]:
        """Return the new tokens of a pass: the same object for the same pass."""
        if batch is not self._batch:
            self.forget_finished()
            self._batch, self._found = batch, None
            self._tokens = [new for entry in batch.entries if (new := NewTokens.of(entry)) is not None]
        return self._tokens

    def _logits(self, tokens: Sequence[NewTokens]) -> Tensor:
        """Follow each text to its end; return logits for the tokens, in order. Shapes: -> [T, layers, E]."""
        if tokens is self._tokens and self._found is not None:
            return self._found
        by_length: dict[int, list[tuple[int, Any]]] = defaultdict(list)
        for place, one in enumerate(tokens):
            num_seen, state = self._start(one)
            by_length[one.stop - num_seen].append((place, state))
        found: dict[int, Tensor] = {}
        for num_new, group in by_length.items():
            places, states = zip(*group, strict=True)
            found.update(zip(places, self._follow(num_new, [tokens[at] for at in places], states), strict=True))
        logits = torch.cat([found[place] for place in range(len(tokens))])
        if tokens is self._tokens:
            self._found = logits
        return logits

    def _start(self, new: NewTokens) -> tuple[int, Any]:
        """Return the position from which to follow a text, and the state there.

        A text that was not followed for long, or is computed again, starts over: no further back than attention sees,
        unless its whole beginning counts.
        """
        earliest = 0 if self._from_start else max(new.stop - self._network.shape.window, 0)
        followed = self._followed.get(new.text)
        if followed is not None and earliest <= followed.num_tokens <= new.start:
            return followed.num_tokens, followed.state
        return min(earliest, new.start), self._network.begin()

    def _follow(self, num_new: int, group: Sequence[NewTokens], states: Sequence[Any]) -> list[Tensor]:
        """Follow texts from these states over their last `num_new` tokens; return logits for each one's own tokens."""
        pieces = []
        for start, stop in pairwise([*range(num_new, 0, -_PIECE_TOKENS), 0]):
            token_ids = [token for one in group for token in one.token_ids(one.stop - start, one.stop - stop)]
            by_text = self._embed(token_ids).view(len(group), start - stop, -1)
            logits, states = self._network.go_on(by_text, states)
            pieces.append(logits)
        for one, state in zip(group, states, strict=True):
            self._followed[one.text] = _Followed(one.stop, state)
        return [of_text[one.start - one.stop :] for of_text, one in zip(torch.cat(pieces, dim=1), group, strict=True)]


def ranked_by_layer(wanted: Tensor) -> list[list[int]]:
    """Return the wanted experts of each layer, the most wanted first. Shapes: wanted [layers, E], 0: not wanted."""
    order = wanted.argsort(dim=-1, descending=True).tolist()
    counts = (wanted > 0).sum(dim=-1).tolist()
    return [experts[:count] for experts, count in zip(order, counts, strict=True)]
