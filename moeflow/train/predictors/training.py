"""Trains one predictor on routed text. A batch has pieces of similar length, so that it has little padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from moeflow.core.errors import ConfigError
from moeflow.models.expert_predictor.network import ExpertPredictor
from moeflow.train.examples import hold_out
from moeflow.train.loop import TrainingTask
from moeflow.train.predictors.loss import routing_loss
from moeflow.train.predictors.recipe import PredictorRecipe
from moeflow.train.predictors.routed_text import RoutedText
from moeflow.train.schedule import Progress, cosine

_HELD_OUT_EVERY: Final = 10  # sequences
_MIN_SEQUENCES: Final = 2
_SORTED_BATCHES: Final = 16  # whose pieces are sorted by length
_WARM_UP_STEPS: Final = 50  # or less: this share of a training
_WARM_UP_SHARE: Final = 0.05
_LAST_RATE: Final = 0.02  # of the learning rate
_GROUP_TOKENS: Final = 4096  # of held-out text in one pass, about


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Rows of the tokens that occur. Shapes: rows [v, H] float32; places [V] int64, each token's row."""

    rows: Tensor
    places: Tensor

    def of(self, token_ids: Tensor) -> Tensor:
        """Return tokens' embeddings. Shapes: token_ids [...] -> [..., H]."""
        return self.rows[self.places[token_ids]]


class PredictorTask(TrainingTask[Sequence[slice]]):
    """Distillation into a predictor."""

    def __init__(
        self, predictor: ExpertPredictor, text: RoutedText, embeddings: Embeddings, recipe: PredictorRecipe
    ) -> None:
        """Raises: ConfigError if the text is too short."""
        self.predictor, self.embeddings, self._text, self._recipe = predictor, embeddings, text, recipe
        self.weights = dict(predictor.named_parameters())
        self.optimizer = torch.optim.AdamW(predictor.parameters(), lr=recipe.learning_rate)
        learn, self.held_out = split(text)
        parts = (piece for where in learn for piece in pieces(where, predictor.shape.window))
        self.learn = [piece for piece in parts if text.is_known[piece].any()]

    def batches(self, epoch: int) -> list[list[slice]]:
        """See `TrainingTask`."""
        chance = torch.Generator().manual_seed(self._recipe.seed * 1_000_003 + epoch)
        order = [self.learn[at] for at in torch.randperm(len(self.learn), generator=chance).tolist()]
        batches: list[list[slice]] = []
        size = self._recipe.batch_size
        for start in range(0, len(order), _SORTED_BATCHES * size):
            alike = sorted(order[start : start + _SORTED_BATCHES * size], key=_length)
            batches += [alike[at : at + size] for at in range(0, len(alike), size)]
        return [batches[at] for at in torch.randperm(len(batches), generator=chance).tolist()]

    def learning_rate(self, progress: Progress, share_done: float) -> float:
        """Return a linear rise over some steps, and half a cosine over all; or a constant."""
        if self._recipe.schedule == "constant":
            return self._recipe.learning_rate
        rising = max((progress.steps + 1) / _WARM_UP_STEPS, share_done / _WARM_UP_SHARE)
        return self._recipe.learning_rate * cosine(share_done, _LAST_RATE) * min(rising, 1.0)

    def loss(self, batch: Sequence[slice], progress: Progress) -> Tensor:
        """See `TrainingTask`."""
        logits = predict(self.predictor, self._text, self.embeddings, batch)
        experts, teacher_logits = self._text.known_experts(batch), self._text.known_logits(batch)
        return routing_loss(logits, experts, teacher_logits, is_truncated=self._recipe.loss == "truncated")

    def held_out_loss(self, progress: Progress) -> float:
        """See `TrainingTask`."""
        groups = in_groups(self.held_out)
        total = sum(float(self.loss(group, progress)) * sum(map(self._num_known, group)) for group in groups)
        return total / sum(map(self._num_known, self.held_out))

    def _num_known(self, where: slice) -> int:
        return int(self._text.is_known[where].sum())


def split(text: RoutedText) -> tuple[list[slice], list[slice]]:
    """Return the sequences to learn from, and a held-out tenth of the sequences without replaced tokens.

    Raises: ConfigError if there are too few.
    """
    is_found = text.is_found.tolist()
    found = [where for where, is_one in zip(text.sequences(), is_found, strict=True) if is_one]
    if len(found) < _MIN_SEQUENCES:
        raise ConfigError("there is too little text to learn from: add text (--data), or more time (--minutes)")
    learn, held_out = hold_out(found, _HELD_OUT_EVERY)
    return learn + [where for where, is_one in zip(text.sequences(), is_found, strict=True) if not is_one], held_out


def sequences_to_learn(text: RoutedText) -> list[list[int]]:
    """Return the tokens of the sequences to learn from. Raises: as `split`."""
    return [text.token_ids[where].tolist() for where in split(text)[0]]


def in_groups(sequences: Sequence[slice]) -> Iterator[list[slice]]:
    """Yield the sequences of each pass, of similar length; the longest last."""
    group: list[slice] = []
    for where in sorted(sequences, key=_length):
        if group and (len(group) + 1) * _length(where) > _GROUP_TOKENS:
            yield group
            group = []
        group.append(where)
    if group:
        yield group


def pieces(where: slice, max_tokens: int) -> Iterator[slice]:
    """Yield parts of a sequence."""
    for start in range(where.start, where.stop, max_tokens):
        yield slice(start, min(start + max_tokens, where.stop))


def predict(predictor: ExpertPredictor, text: RoutedText, embeddings: Embeddings, batch: Sequence[slice]) -> Tensor:
    """Return logits for the known tokens of independent sequences. Shapes: -> [N, layers, E]."""
    token_ids = pad_sequence([text.token_ids[where] for where in batch], batch_first=True)
    lengths = torch.tensor([_length(where) for where in batch])
    is_there = torch.arange(token_ids.shape[1]) < lengths[:, None]
    logits: Tensor = predictor(embeddings.of(token_ids), lengths)
    return logits[is_there][torch.cat([text.is_known[where] for where in batch])]


def _length(where: slice) -> int:
    return int(where.stop - where.start)
