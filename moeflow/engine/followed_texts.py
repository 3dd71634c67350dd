"""Asks a predictor about passes of texts: each is taken up where it was left, and what came before is a state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeflow.core.batch import BatchEntry
from moeflow.core.request import Request, RequestStatus
from moeflow.models.expert_predictor.network import ExpertPredictor, PredictorState


@dataclass(frozen=True, slots=True)
class NewTokens:
    """The tokens of a text that a pass computes."""

    text: Hashable
    start: int  # position of the first of them
    stop: int  # one past the last
    token_ids: Callable[[int, int], list[int]]  # start, stop -> those of the text from one position up to another

    @classmethod
    def of(cls, entry: BatchEntry) -> NewTokens | None:
        """Return those of a request, drafted ones left out; None: its decoder computes none of its own.

        What an encoder sees comes before what the decoder continues, without the filling between them.
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
    """How far a text has been taken up."""

    num_tokens: int
    state: PredictorState


class FollowedTexts:
    """Texts that a predictor is asked about, pass by pass."""

    def __init__(self, predictor: ExpertPredictor, embed: Callable[[Tensor], Tensor]) -> None:
        """`embed` returns embeddings [T, H] of token ids [T]."""
        self.predictor, self._embed = predictor, embed
        self._followed: dict[Hashable, _Followed] = {}

    @torch.inference_mode()
    def wanted(self, tokens: Sequence[NewTokens]) -> Tensor:
        """Return how much experts are wanted by a pass: for each token as many count as its router chooses.

        Shapes: -> [layers, E] float32, sums of probabilities; 0: by no token.
        """
        probabilities = self._logits(tokens).softmax(-1)
        likeliest = probabilities.topk(self.predictor.shape.top_k, dim=-1)
        return torch.zeros_like(probabilities).scatter_(-1, likeliest.indices, likeliest.values).sum(0)

    def forget_finished(self) -> None:
        """Forget the texts of requests that are finished."""
        self._followed = {
            text: followed
            for text, followed in self._followed.items()
            if not (isinstance(text, Request) and text.status is RequestStatus.FINISHED)
        }

    def _logits(self, tokens: Sequence[NewTokens]) -> Tensor:
        """Process the new tokens of each text; return logits for the pass's tokens. Shapes: -> [T, layers, E]."""
        by_length: dict[int, list[tuple[NewTokens, PredictorState]]] = defaultdict(list)
        for one in tokens:
            num_seen, state = self._start(one)
            by_length[one.stop - num_seen].append((one, state))
        return torch.cat([self._take_up(num_new, group) for num_new, group in by_length.items()])

    def _start(self, new: NewTokens) -> tuple[int, PredictorState]:
        """Return the position where a text resumes, and its state there.

        A text that was not followed for long, or is recomputed, starts anew, no further back than attention sees.
        """
        earliest = max(new.stop - self.predictor.shape.window, 0)
        followed = self._followed.get(new.text)
        if followed is not None and earliest <= followed.num_tokens <= new.start:
            return followed.num_tokens, followed.state
        return min(earliest, new.start), self.predictor.begin()

    def _take_up(self, num_new: int, group: Sequence[tuple[NewTokens, PredictorState]]) -> Tensor:
        token_ids = [one.token_ids(one.stop - num_new, one.stop) for one, _ in group]
        embeddings = self._embed(torch.tensor(token_ids).flatten()).float()
        by_text = embeddings.view(len(group), num_new, -1)
        logits, states = self.predictor.go_on(by_text, [state for _, state in group])
        for (one, _), state in zip(group, states, strict=True):
            self._followed[one.text] = _Followed(one.stop, state)
        return torch.cat([of_text[one.start - one.stop :] for of_text, (one, _) in zip(logits, group, strict=True)])


def in_order_of_need(wanted: Tensor) -> list[int]:
    """Return numbers over all layers of experts that are wanted at all, layer by layer, the most wanted first.

    Shapes: wanted [layers, E] float32, 0 for experts that no token will need.
    """
    num_experts = wanted.shape[1]
    return [at * num_experts + expert for at, experts in enumerate(named_by_layer(wanted)) for expert in experts]


def named_by_layer(wanted: Tensor) -> list[list[int]]:
    """Return of each layer the experts that are wanted at all, the most wanted first. Shapes: wanted [layers, E]."""
    order = wanted.argsort(dim=-1, descending=True).tolist()
    counts = (wanted > 0).sum(dim=-1).tolist()
    return [experts[:count] for experts, count in zip(order, counts, strict=True)]
