"""A model that drafts for another one: smaller, with fewer layers, or the same one in fewer bits.

It has its own keys and values, which follow the requests: accepted drafts are there already, rejected ones are
overwritten. Before a pass it computes new tokens, then drafts one token after another, for all requests at once. If it
is unsure, it drafts the next likeliest tokens, too. (Leviathan et al., 2211.17192; a draft's probability predicts its
acceptance, and so where to branch and to stop: EAGLE-2, 2406.16858.)
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from moeflow.core.request import Request
from moeflow.engine.speculators.routing_advice import RoutingAdvice
from moeflow.experts.prefetch.driver import PrefetchDriver
from moeflow.kernels.arrays import rows_of
from moeflow.kernels.on_demand import torch, without_gradients
from moeflow.kv.block_tables import BlockTables
from moeflow.kv.storage import KVStorage
from moeflow.models.layers.decoder import CausalLM
from moeflow.models.pass_input import PassInput
from moeflow.speculation.speculator import Draft, Experts

if TYPE_CHECKING:
    from torch import Tensor

GRADES: Final = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)  # probabilities where the next begins
RUNNER_UP: Final = len(GRADES) + 1  # added to grades of other tokens than the likeliest, which are accepted less often
NUM_LIKELIEST: Final = 3  # maximum of drafted tokens for one place
LEAST_PATH: Final = 0.25  # probability of all tokens so far, below which no further one is computed
LIKELY: Final = 0.5  # probability of all tokens so far, from which their experts are read before the governor chooses
UNTRIED: Final = 0.5  # share of right ones that is believed at least of likeliest tokens, until some have been judged
LEAST_BRANCH: Final = 0.1  # the same for other tokens than the likeliest: least grade of a draft
MIN_CHUNK: Final = 2  # tokens that a request may have computed in any case: as many as a pass can leave, and more


class Advice(NamedTuple):
    """Predicts the experts of drafted tokens, and prefetches them."""

    routing: RoutingAdvice
    prefetch: PrefetchDriver[Any]


class DraftModel:
    """A `Speculator` that computes."""

    def __init__(
        self,
        name: str,
        model: CausalLM,
        kv: KVStorage,
        tables: BlockTables,
        *,
        vocabulary: Sequence[int],
        chunk_tokens: int,
        advice: Advice | None = None,
    ) -> None:
        """`vocabulary` maps each logit of this model to a token of the target model.

        `chunk_tokens` of prompts are computed before a pass; `advice` where experts come from disk, and the two models
        are alike.
        """
        self.name = name
        self.tables = tables
        self.is_eager = False  # drafts to the full depth, and alternatives of every token, however unlikely
        self._model, self._kv = model, kv
        self._vocabulary = vocabulary
        self._chunk_tokens = chunk_tokens
        self._advice = advice
        self._cached: dict[Request, _Cached] = {}

    @without_gradients
    def propose(self, requests: Sequence[Request], max_depth: int) -> list[list[Draft]]:
        """See `Speculator`. Requests that it is behind with get nothing until it has caught up."""
        if self._advice is not None:
            self._advice.prefetch.begin_drafting()
        least = (0.0, 0.0) if self.is_eager else (LEAST_PATH, LEAST_BRANCH)
        paths = [
            _Path(request, depth, *least) for request in requests if (depth := self._depth(request, max_depth)) > 0
        ]
        growing, computed = self._catch_up(paths)
        while growing:
            self._expect(growing, computed.experts)
            likeliest = _likeliest(computed.logits, self._vocabulary)
            growing = [path for path, next_tokens in zip(growing, likeliest, strict=True) if path.grow(next_tokens)]
            if growing:
                computed = self._compute([path.last for path in growing], range(len(growing)))
        for path in paths:
            if path.request in self._cached:  # all of a path but its end has been computed
                self._cached[path.request].drafts = path.token_ids[:-1]
        drafts = {path.request: path.drafts for path in paths}
        return [drafts.get(request, []) for request in requests]

    def _expect(self, paths: Sequence[_Path], experts: Sequence[Experts]) -> None:
        """Note what the ends of paths need, and have it read where these are likely to be computed."""
        for path, of_end in zip(paths, experts, strict=True):
            path.experts.append(of_end)
        if self._advice is not None:
            likely = [of_end for path, of_end in zip(paths, experts, strict=True) if path.probability >= LIKELY]
            self._advice.prefetch.expect_drafted(frozenset().union(*likely))

    def believed(self, grade: int) -> float:
        """See `Speculator`: the model's own probability.

        A likeliest token has the benefit of the doubt, or it would not be tried: greedy requests take it more often.
        """
        place = grade % RUNNER_UP
        edges = (0.0, *GRADES, 1.0)
        probability = (edges[place] + edges[place + 1]) / 2
        return probability if grade >= RUNNER_UP else max(probability, UNTRIED)

    def forget(self, request: Request) -> None:
        """Free a request's blocks."""
        if self._cached.pop(request, None) is not None:
            self.tables.close(request)
            self._kv.give_back(self.tables.give_back())

    def _depth(self, request: Request, max_depth: int) -> int:
        """Return how many tokens may be of use, and have positions that the model was made for."""
        left = request.max_tokens - len(request.output_token_ids) - 1
        return min(max_depth, left, self._model.config.max_position - request.num_tokens)

    def _catch_up(self, paths: Sequence[_Path]) -> tuple[list[_Path], _Computed]:
        """Compute new tokens; return the complete requests, and the results of their last tokens."""
        pieces: list[_DraftPiece] = []
        ready: list[_Path] = []
        rows: list[int] = []
        num_rows = 0
        for place, path in enumerate(paths):
            piece = self._next_piece(path, paths[place + 1 :], max(self._chunk_tokens - num_rows, MIN_CHUNK))
            if piece is None:
                continue
            pieces.append(piece)
            num_rows += len(piece.token_ids)
            if piece.stop == path.request.num_tokens:
                ready.append(path)
                rows.append(num_rows - 1)
        if not pieces:
            return [], _Computed(torch.empty(0, len(self._vocabulary)), [])
        computed = self._compute(pieces, rows)
        for piece in pieces:
            self._cached[piece.request].num_tokens = piece.stop
            self.tables.share(piece.request, piece.stop)
        self.tables.confirm_pass()
        return ready, computed

    def _next_piece(self, path: _Path, younger: Sequence[_Path], max_tokens: int) -> _DraftPiece | None:
        """Return what of a request is computed next; None: it has no free slot."""
        request = path.request
        cached = self._cached.get(request)
        if cached is None:
            cached = self._cached[request] = _Cached(self.tables.open(request))
        cached.follow(request)
        if not self._has_room(request, request.num_tokens + path.max_depth - 1, younger):
            self.forget(request)
            return None
        start = cached.num_tokens
        return _DraftPiece(request, start, request.token_ids(start, min(start + max_tokens, request.num_tokens)))

    def _has_room(self, request: Request, num_tokens: int, younger: Sequence[_Path]) -> bool:
        """Reserve blocks, if need be those of younger requests, the youngest first."""
        others = [path.request for path in younger if path.request in self._cached]
        while not self.tables.reserve(request, num_tokens):
            if not others:
                return False
            self.forget(others.pop())
        return True

    def _compute(self, pieces: Sequence[_DraftPiece], rows: Sequence[int]) -> _Computed:
        """Return the results of some tokens, and keep keys and values of all."""
        last_id = self._model.config.vocab_size - 1  # stands for the engine's ids without a token that are above it
        given = PassInput(
            token_ids=[min(token_id, last_id) for piece in pieces for token_id in piece.token_ids],
            starts=[piece.start for piece in pieces],
            num_tokens=[len(piece.token_ids) for piece in pieces],
            block_ids=[self.tables.block_ids(piece.request, piece.stop) for piece in pieces],
            logit_rows=[],
        )
        token_ids, context = given.tensors(self._kv, self._model.device)
        kept: list[tuple[Tensor, Tensor]] = []
        if self._advice is not None and rows:
            context = replace(context, on_inputs=lambda *tensors: kept.append(tensors))
        hidden = self._model(token_ids, context)
        if not rows:
            return _Computed(torch.empty(0, len(self._vocabulary)), [])
        experts = [frozenset[int]()] * len(rows)
        if self._advice is not None:
            ((inputs, outputs),) = kept
            experts = self._advice.routing.experts_of(inputs[:, list(rows)], outputs[list(rows)])
        return _Computed(self._model.logits(rows_of(hidden, list(rows))), experts)


class _Computed(NamedTuple):
    """The results for some tokens."""

    logits: Tensor  # [R, V] float32, of what follows each: of the vocabulary's tokens, and maybe others behind them
    experts: list[Experts]  # that the engine's model will need for each; empty sets: that is not known


class _DraftPiece(NamedTuple):
    """Tokens of one request that are computed at once."""

    request: Request
    start: int
    token_ids: list[int]

    @property
    def stop(self) -> int:
        """One past the last position."""
        return self.start + len(self.token_ids)


@dataclass(slots=True)
class _Cached:
    """Of what there are keys and values."""

    num_tokens: int  # of the request
    drafts: list[int] = field(default_factory=list)  # behind them

    def follow(self, request: Request) -> None:
        """Keep accepted drafts as the request's tokens and drop the others; its last token is not computed yet."""
        said = request.token_ids(self.num_tokens, self.num_tokens + len(self.drafts))
        for draft, token_id in zip(self.drafts, said, strict=False):
            if draft != token_id:
                break
            self.num_tokens += 1
        self.drafts = []
        self.num_tokens = min(self.num_tokens, request.num_tokens - 1)


@dataclass(slots=True)
class _Path:
    """The likeliest tokens after a request's, and where they might have been others."""

    request: Request
    max_depth: int
    least_path: float
    least_branch: float
    token_ids: list[int] = field(default_factory=list)
    experts: list[Experts] = field(default_factory=list)  # of the request's last token and all of these but the last
    _grades: list[int] = field(default_factory=list)
    probability: float = 1.0  # of all of them
    _branches: list[Draft] = field(default_factory=list)

    def grow(self, likeliest: Sequence[tuple[int, float]]) -> bool:
        """Add the likeliest next token; return whether the one after it is worth computing."""
        (token_id, probability), *others = likeliest
        for other, chance in others:
            if self.probability * chance >= self.least_branch:
                grades = (*self._grades, RUNNER_UP + _grade(chance))
                self._branches.append(Draft((*self.token_ids, other), grades, tuple(self.experts)))
        self.token_ids.append(token_id)
        self._grades.append(_grade(probability))
        self.probability *= probability
        return len(self.token_ids) < self.max_depth and self.probability >= self.least_path

    @property
    def last(self) -> _DraftPiece:
        """The end of the path, from which it grows."""
        return _DraftPiece(self.request, self.request.num_tokens + len(self.token_ids) - 1, self.token_ids[-1:])

    @property
    def drafts(self) -> list[Draft]:
        """The path, then its branches; nothing if it has no token."""
        path = Draft(tuple(self.token_ids), tuple(self._grades), tuple(self.experts))
        return [path, *self._branches] if self.token_ids else []


def _grade(probability: float) -> int:
    return bisect_right(GRADES, probability)


def _likeliest(logits: Tensor, vocabulary: Sequence[int]) -> list[list[tuple[int, float]]]:
    """Return the likeliest tokens after each row and their probabilities. Shapes: logits [R, V]."""
    found = torch.softmax(logits[:, : len(vocabulary)], dim=-1).topk(min(NUM_LIKELIEST, len(vocabulary)))
    return [
        [(vocabulary[place], chance) for place, chance in zip(places, chances, strict=True)]
        for places, chances in zip(found.indices.tolist(), found.values.tolist(), strict=True)
    ]
