"""Trains one predictor on routed text: epochs, a look at held-out text after each, and a state to go on from.

Pieces of about the same length are computed together, so that little is filling, and the learning rate falls to nearly
nothing by the end.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from moeflow.core.errors import ConfigError
from moeflow.models.expert_predictor.network import ExpertPredictor
from moeflow.train.kept_training import copied, kept_tensors, restore_tensors
from moeflow.train.predictors.loss import routing_loss
from moeflow.train.predictors.routed_text import RoutedText

PATIENCE: Final = 5  # epochs without a better loss that end it
_HELD_OUT_EVERY: Final = 10  # sequences, of which one is kept to measure with
_MIN_SEQUENCES: Final = 2
_LONGEST_GRADIENT: Final = 1.0
_SORTED_BATCHES: Final = 16  # whose pieces are put together by length
_WARM_UP_STEPS: Final = 50  # in which the learning rate rises, or if it is less
_WARM_UP_SHARE: Final = 0.05  # of a training
_LAST_RATE: Final = 0.02  # of the learning rate, at the end
_LOOK_TOKENS: Final = 4096  # of held-out text that are computed together, about


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long a training goes on, at most."""

    epochs: int | None = None  # None: as many as the time allows
    seconds: float = math.inf


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a training is."""

    epoch: int = 0
    step: int = 0  # within the epoch
    num_steps: int = 0  # in all
    best_loss: float = math.inf  # on held-out text, in nats
    best_epoch: int = 0
    looks_since: int = 0  # the best one
    spent_s: float = 0.0

    def is_over(self, limits: Limits) -> bool:
        """Whether nothing is left to do."""
        has_all = limits.epochs is not None and self.epoch >= limits.epochs
        return has_all or self.spent_s >= limits.seconds or self.looks_since >= PATIENCE

    def share_done(self, limits: Limits, steps_of_epoch: int) -> float:
        """Return how far it is to the limit that comes first: 0 to 1."""
        of_epochs = 0.0
        if limits.epochs is not None:
            of_epochs = (self.epoch + self.step / steps_of_epoch) / limits.epochs
        return min(max(of_epochs, self.spent_s / limits.seconds), 1.0)


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Rows of tokens that occur. Shapes: rows [v, H] float32; places [V] int64, of each token's row."""

    rows: Tensor
    places: Tensor

    def of(self, token_ids: Tensor) -> Tensor:
        """Return tokens' embeddings. Shapes: token_ids [...] -> [..., H]."""
        return self.rows[self.places[token_ids]]


class Training:
    """A predictor that is learning."""

    def __init__(
        self,
        predictor: ExpertPredictor,
        text: RoutedText,
        embeddings: Embeddings,
        *,
        learning_rate: float,
        batch_sequences: int,
        seed: int,
    ) -> None:
        """Raises: ConfigError if the text is too short."""
        self.progress = Progress()
        self.predictor = predictor
        self._weights = dict(predictor.named_parameters())
        self.best = copied(self._weights)
        self.embeddings = embeddings
        self._text, self._seed, self._batch = text, seed, batch_sequences
        learn, self._held_out = split(text)
        parts = (piece for where in learn for piece in pieces(where, predictor.shape.window))
        self._learn = [piece for piece in parts if text.is_known[piece].any()]
        self._learning_rate = learning_rate
        self._optimizer = torch.optim.AdamW(predictor.parameters(), lr=learning_rate)

    def run(self, limits: Limits, on_step: Callable[[Progress], None]) -> None:
        """Go on to the end; `on_step` is called after each step, when state may be taken."""
        while not self.progress.is_over(limits):
            start_s = time.perf_counter()
            batches = self._batches()
            if self.progress.step < len(batches):
                self._set_rate(self.progress.share_done(limits, len(batches)))
                self._step(batches[self.progress.step])
                now = self.progress
                self.progress = replace(now, step=now.step + 1, num_steps=now.num_steps + 1)
            if self.progress.step >= len(batches):
                self._look()
            spent_s = self.progress.spent_s + time.perf_counter() - start_s
            self.progress = replace(self.progress, spent_s=spent_s)
            on_step(self.progress)
        if self.progress.step:  # time was up within an epoch
            self._look()

    def best_predictor(self) -> ExpertPredictor:
        """Return the predictor as it was when it did best on held-out text."""
        self.predictor.load_state_dict(self.best)
        return self.predictor

    def tensors(self) -> dict[str, Tensor]:
        """Return all that the rest of the training depends on, beside `progress`."""
        return kept_tensors(self._weights, self.best, self._optimizer)

    def restore(self, progress: Progress, tensors: dict[str, Tensor]) -> None:
        """Go back to where `tensors` were taken."""
        self.progress = progress
        restore_tensors(self._weights, self.best, self._optimizer, tensors)

    def _batches(self) -> list[list[slice]]:
        """Return the pieces of an epoch, some together, in an order that epoch and seed alone decide."""
        chance = torch.Generator().manual_seed(self._seed * 1_000_003 + self.progress.epoch)
        order = [self._learn[at] for at in torch.randperm(len(self._learn), generator=chance).tolist()]
        batches: list[list[slice]] = []
        for start in range(0, len(order), _SORTED_BATCHES * self._batch):
            alike = sorted(order[start : start + _SORTED_BATCHES * self._batch], key=_length)
            batches += [alike[at : at + self._batch] for at in range(0, len(alike), self._batch)]
        return [batches[at] for at in torch.randperm(len(batches), generator=chance).tolist()]

    def _set_rate(self, share_done: float) -> None:
        """Set the learning rate: it rises for some steps, then falls as a cosine does."""
        falling = _LAST_RATE + (1 - _LAST_RATE) * (1 + math.cos(math.pi * share_done)) / 2
        rising = max((self.progress.num_steps + 1) / _WARM_UP_STEPS, share_done / _WARM_UP_SHARE)
        for group in self._optimizer.param_groups:
            group["lr"] = self._learning_rate * falling * min(rising, 1.0)

    def _step(self, batch: Sequence[slice]) -> None:
        torch.autograd.backward(self._loss(batch))
        torch.nn.utils.clip_grad_norm_(self.predictor.parameters(), _LONGEST_GRADIENT)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _loss(self, batch: Sequence[slice]) -> Tensor:
        text = self._text
        logits = guesses(self.predictor, text, self.embeddings, batch)
        return routing_loss(logits, text.known_experts(batch), text.known_logits(batch))

    def _num_known(self, where: slice) -> int:
        return int(self._text.is_known[where].sum())

    @torch.no_grad()
    def _look(self) -> None:
        """Measure on held-out text, keep the predictor if it is the best so far, and begin another epoch."""
        total = sum(float(self._loss(group)) * sum(map(self._num_known, group)) for group in in_groups(self._held_out))
        loss = total / sum(map(self._num_known, self._held_out))
        now = replace(self.progress, epoch=self.progress.epoch + 1, step=0)
        if loss < now.best_loss:
            self.best = copied(self._weights)
            self.progress = replace(now, best_loss=loss, best_epoch=now.epoch, looks_since=0)
        else:
            self.progress = replace(now, looks_since=now.looks_since + 1)


def split(text: RoutedText) -> tuple[list[slice], list[slice]]:
    """Return the sequences to learn from, and a tenth of those that were found, which is held out.

    Raises: ConfigError if there are too few.
    """
    ends = text.lengths.cumsum(0).tolist()
    sequences = [slice(end - length, end) for end, length in zip(ends, text.lengths.tolist(), strict=True)]
    is_found = text.is_found.tolist()
    found = [where for where, is_one in zip(sequences, is_found, strict=True) if is_one]
    if len(found) < _MIN_SEQUENCES:
        raise ConfigError("there is too little text to learn from: give more (--data), or more time (--minutes)")
    every = min(_HELD_OUT_EVERY, len(found))
    learn = [where for place, where in enumerate(found) if (place + 1) % every]
    made = [where for where, is_one in zip(sequences, is_found, strict=True) if not is_one]
    return learn + made, found[every - 1 :: every]


def sequences_to_learn(text: RoutedText) -> list[list[int]]:
    """Return the tokens of the sequences that are not held out. Raises: ConfigError likewise."""
    return [text.token_ids[where].tolist() for where in split(text)[0]]


def in_groups(sequences: Sequence[slice]) -> Iterator[list[slice]]:
    """Yield sequences that are computed together, those of about the same length; longest last."""
    group: list[slice] = []
    for where in sorted(sequences, key=_length):
        if group and (len(group) + 1) * _length(where) > _LOOK_TOKENS:
            yield group
            group = []
        group.append(where)
    if group:
        yield group


def pieces(where: slice, num_tokens: int) -> Iterator[slice]:
    """Yield parts of a sequence, of at most so many tokens."""
    for start in range(where.start, where.stop, num_tokens):
        yield slice(start, min(start + num_tokens, where.stop))


def guesses(predictor: ExpertPredictor, text: RoutedText, embeddings: Embeddings, batch: Sequence[slice]) -> Tensor:
    """Return logits for the known tokens of some sequences, which see nothing of each other.

    Shapes: -> [N, layers, E].
    """
    token_ids = pad_sequence([text.token_ids[where] for where in batch], batch_first=True)
    is_there = pad_sequence(
        [torch.ones(where.stop - where.start, dtype=torch.bool) for where in batch], batch_first=True
    )
    logits: Tensor = predictor(embeddings.of(token_ids), is_there.sum(1))
    return logits[is_there][torch.cat([text.is_known[where] for where in batch])]


def _length(where: slice) -> int:
    return int(where.stop - where.start)
