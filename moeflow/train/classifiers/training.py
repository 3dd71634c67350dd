"""Trains one classifier: epochs, a look at held-out texts after each, and a state to go on from."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from moeflow.core.errors import ConfigError
from moeflow.train.classifiers.labelled_text import LabelledText
from moeflow.train.classifiers.network import SwitchClassifier
from moeflow.train.kept_training import copied, kept_tensors, restore_tensors
from moeflow.train.predictors.training import Limits, Progress

BALANCE: Final = 0.01  # alpha of 2101.03961, equation 4
Z_LOSS: Final = 0.001  # as in ST-MoE (2202.08906)
_WARM_UP_STEPS: Final = 50
_HELD_OUT_EVERY: Final = 10  # texts, of which one is kept to measure with
_LONGEST_GRADIENT: Final = 1.0
_MEASURED_TOGETHER: Final = 64  # texts


class ClassifierTraining:
    """A classifier that is learning."""

    def __init__(
        self, network: SwitchClassifier, text: LabelledText, *, learning_rate: float, batch_size: int, seed: int
    ) -> None:
        """Raises: ConfigError if there are too few texts."""
        self.progress = Progress()
        self.network = network
        self._weights = dict(network.named_parameters())
        self.best = copied(self._weights)
        self.learnt_from, self.held_out = split(text)
        self._rate, self._batch, self._seed = learning_rate, batch_size, seed
        self._optimizer = torch.optim.Adam(network.parameters(), lr=learning_rate, fused=True)

    def run(self, limits: Limits, on_step: Callable[[Progress], None]) -> None:
        """Go on to the end; `on_step` is called after each step, when state may be taken."""
        while not self.progress.is_over(limits):
            start_s = time.perf_counter()
            batches = self._batches()
            self._step(batches[self.progress.step])
            self.progress = replace(self.progress, step=self.progress.step + 1)
            if self.progress.step >= len(batches):
                self._look()
            spent_s = self.progress.spent_s + time.perf_counter() - start_s
            self.progress = replace(self.progress, spent_s=spent_s)
            on_step(self.progress)
        if self.progress.step:  # time was up within an epoch
            self._look()

    def best_network(self) -> SwitchClassifier:
        """Return the classifier as it was when it did best on held-out texts."""
        self.network.load_state_dict(self.best)
        return self.network.eval()

    def tensors(self) -> dict[str, Tensor]:
        """Return all that the rest of the training depends on, beside `progress`."""
        return kept_tensors(self._weights, self.best, self._optimizer)

    def restore(self, progress: Progress, tensors: dict[str, Tensor]) -> None:
        """Go back to where `tensors` were taken."""
        self.progress = progress
        restore_tensors(self._weights, self.best, self._optimizer, tensors)

    def _batches(self) -> list[list[int]]:
        """Return the texts of an epoch, some together, in an order that epoch and seed alone decide."""
        chance = torch.Generator().manual_seed(self._seed * 1_000_003 + self.progress.epoch)
        order = torch.randperm(len(self.learnt_from.token_ids), generator=chance).tolist()
        return [order[start : start + self._batch] for start in range(0, len(order), self._batch)]

    def _step(self, batch: Sequence[int]) -> None:
        epoch, step = self.progress.epoch, self.progress.step
        with torch.random.fork_rng(devices=[]):  # what dropout takes away depends on the step alone
            torch.manual_seed((self._seed * 1_000_003 + epoch) * 1_000_003 + step)
            self.network.train()
            torch.autograd.backward(self._loss(self.learnt_from.part(batch)))
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), _LONGEST_GRADIENT)
        warm = 1.0 if epoch else min((step + 1) / _WARM_UP_STEPS, 1.0)
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate * warm
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _loss(self, text: LabelledText) -> Tensor:
        logits, routed = self.network(text.token_ids)
        extra = [BALANCE * layer.balance_loss() + Z_LOSS * layer.z_loss() for layer in routed]
        return F.cross_entropy(logits, text.classes) + torch.stack(extra).sum()

    def _look(self) -> None:
        """Measure on held-out texts, keep the classifier if it is the best so far, and begin another epoch."""
        loss = float(F.cross_entropy(class_logits(self.network, self.held_out), self.held_out.classes))
        now = replace(self.progress, epoch=self.progress.epoch + 1, step=0)
        if loss < now.best_loss:
            self.best = copied(self._weights)
            self.progress = replace(now, best_loss=loss, best_epoch=now.epoch, looks_since=0)
        else:
            self.progress = replace(now, looks_since=now.looks_since + 1)


@torch.no_grad()
def class_logits(network: SwitchClassifier, text: LabelledText) -> Tensor:
    """Return logits for all texts, without dropout. Shapes: -> [texts, classes]."""
    network.eval()
    texts = text.token_ids
    starts = range(0, len(texts), _MEASURED_TOGETHER)
    return torch.cat([network(texts[start : start + _MEASURED_TOGETHER])[0] for start in starts])


def accuracy(network: SwitchClassifier, text: LabelledText) -> float:
    """Return the share of texts whose likeliest class is theirs."""
    return float((class_logits(network, text).argmax(dim=1) == text.classes).float().mean())


def split(text: LabelledText) -> tuple[LabelledText, LabelledText]:
    """Return the texts to learn from and a tenth that is held out. Raises: ConfigError if there are too few."""
    num_texts = len(text.token_ids)
    if num_texts < _HELD_OUT_EVERY:
        raise ConfigError(f"{num_texts} texts are too few to learn from: give {_HELD_OUT_EVERY} or more (--data)")
    held_out = range(_HELD_OUT_EVERY - 1, num_texts, _HELD_OUT_EVERY)
    return text.part([at for at in range(num_texts) if at not in held_out]), text.part(held_out)
