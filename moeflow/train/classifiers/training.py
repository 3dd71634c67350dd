"""Trains one classifier on labelled texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from moeflow.core.errors import ConfigError
from moeflow.train.classifiers.labelled_text import LabelledText
from moeflow.train.classifiers.network import SwitchClassifier
from moeflow.train.classifiers.recipe import ClassifierRecipe
from moeflow.train.examples import epoch_order, hold_out
from moeflow.train.loop import TrainingTask
from moeflow.train.schedule import Progress

BALANCE: Final = 0.01  # alpha of 2101.03961, equation 4
Z_LOSS: Final = 0.001  # as in ST-MoE (2202.08906)
_WARM_UP_STEPS: Final = 50  # of the first epoch
_HELD_OUT_EVERY: Final = 10  # texts
_PASS_TEXTS: Final = 64


class ClassifierTask(TrainingTask[Sequence[int]]):
    """Cross entropy with the router's losses."""

    def __init__(self, network: SwitchClassifier, text: LabelledText, recipe: ClassifierRecipe) -> None:
        """Raises: ConfigError if there are too few texts."""
        self.network = network
        self.weights = dict(network.named_parameters())
        self.optimizer = torch.optim.Adam(network.parameters(), lr=recipe.learning_rate, fused=True)
        self.learn, self.held_out = split(text)
        self._recipe = recipe

    def batches(self, epoch: int) -> list[list[int]]:
        """See `TrainingTask`."""
        order, size = epoch_order(len(self.learn.token_ids), epoch, self._recipe.seed), self._recipe.batch_size
        return [order[start : start + size] for start in range(0, len(order), size)]

    def learning_rate(self, progress: Progress, share_done: float) -> float:
        """Return a linear rise in the first epoch, then a constant."""
        warm_up = 1.0 if progress.epoch else min((progress.steps + 1) / _WARM_UP_STEPS, 1.0)
        return self._recipe.learning_rate * warm_up

    def loss(self, batch: Sequence[int], progress: Progress) -> Tensor:
        """Return the loss, whose dropout depends on the step alone."""
        text = self.learn.part(batch)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed((self._recipe.seed * 1_000_003 + progress.epoch) * 1_000_003 + progress.epoch_step)
            logits, routed = self.network.train()(text.token_ids)
        extra = [BALANCE * layer.balance_loss() + Z_LOSS * layer.z_loss() for layer in routed]
        return F.cross_entropy(logits, text.classes) + torch.stack(extra).sum()

    def held_out_loss(self, progress: Progress) -> float:
        """Return the cross entropy alone."""
        return float(F.cross_entropy(class_logits(self.network, self.held_out), self.held_out.classes))


@torch.no_grad()
def class_logits(network: SwitchClassifier, text: LabelledText) -> Tensor:
    """Return logits for all texts, without dropout. Shapes: -> [texts, classes]."""
    network.eval()
    texts = text.token_ids
    return torch.cat([network(texts[start : start + _PASS_TEXTS])[0] for start in range(0, len(texts), _PASS_TEXTS)])


def accuracy(network: SwitchClassifier, text: LabelledText) -> float:
    """Return the share of texts with the right class as the likeliest."""
    return float((class_logits(network, text).argmax(dim=1) == text.classes).float().mean())


def split(text: LabelledText) -> tuple[LabelledText, LabelledText]:
    """Return the texts to learn from and a held-out tenth. Raises: ConfigError if there are too few."""
    num_texts = len(text.token_ids)
    if num_texts < _HELD_OUT_EVERY:
        raise ConfigError(f"{num_texts} texts are too few to learn from: use {_HELD_OUT_EVERY} or more (--data)")
    learn, held_out = hold_out(range(num_texts), _HELD_OUT_EVERY)
    return text.part(learn), text.part(held_out)
