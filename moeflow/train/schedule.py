"""The position of a training, its limits, and the decay of its learning rate."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The position of a training."""

    epoch: int = 0  # complete epochs
    epoch_step: int = 0  # steps of the current epoch
    steps: int = 0  # of all epochs
    evaluated_at: int = 0  # `steps` at the last evaluation
    best_loss: float = math.inf  # on held-out data, in nats
    since_best: int = 0  # evaluations
    spent_s: float = 0.0

    @property
    def begun_epochs(self) -> int:
        """Epochs, including an incomplete one."""
        return self.epoch + bool(self.epoch_step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The limits of a training, and its threads and precision. The first limit ends it."""

    steps: int | None = None
    epochs: int | None = None
    seconds: float = math.inf
    evaluate_every: int | None = None  # steps; None: each epoch
    patience: int = 5  # evaluations without a better loss
    num_threads: int | None = None  # None: torch's own number
    in_bfloat16: bool = False  # matrix products

    def is_over(self, progress: Progress) -> bool:
        """Whether a limit is reached."""
        return (
            (self.steps is not None and progress.steps >= self.steps)
            or (self.epochs is not None and progress.epoch >= self.epochs)
            or progress.spent_s >= self.seconds
            or progress.since_best >= self.patience
        )

    def is_evaluation_due(self, progress: Progress) -> bool:
        """Whether to evaluate before the next step."""
        if progress.evaluated_at == progress.steps:
            return False
        if self.evaluate_every is None:
            return progress.epoch_step == 0
        return progress.steps % self.evaluate_every == 0

    def share_done(self, progress: Progress, steps_of_epoch: int) -> float:
        """Return the share of the nearest limit that is used: 0 to 1."""
        shares = [progress.spent_s / self.seconds]
        if self.steps is not None:
            shares.append(progress.steps / self.steps)
        if self.epochs is not None:
            shares.append((progress.epoch + progress.epoch_step / steps_of_epoch) / self.epochs)
        return min(max(shares), 1.0)

    def count(self, progress: Progress) -> tuple[int, int]:
        """Return done and total for a progress bar: steps, epochs or seconds."""
        done, total = progress.spent_s, self.seconds
        if self.steps is not None:
            done, total = progress.steps, self.steps
        elif self.epochs is not None:
            done, total = progress.epoch, self.epochs
        return int(min(done, total)), max(int(total), 1)


def limited(epochs: int | None, seconds: float) -> Schedule:
    """Return the schedule of a number of epochs, or else of a time."""
    return Schedule(seconds=seconds) if epochs is None else Schedule(epochs=epochs)


def cosine(share_done: float, last: float) -> float:
    """Return the share of the peak rate on half a cosine from 1 down to `last`."""
    return last + (1 - last) * (1 + math.cos(math.pi * share_done)) / 2
