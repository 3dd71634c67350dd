"""The one training loop: steps, evaluation on held-out data, early stopping, a time budget, and resuming.

It is ours because transformers' Trainer and Lightning Fabric do not resume a time budget to the same bits. Both add a
dependency and seconds of import.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from moeflow.core.errors import ConfigError
from moeflow.kernels.interrupts import hold_interrupts
from moeflow.train.work_folder import StateFile

SAVE_EVERY_S: Final = 60.0
SAVING_SHARE: Final = 0.1  # of the time, at most: the state of a large network takes seconds to write
_MAX_GRADIENT_NORM: Final = 1.0
_ADAM_STATE: Final = ("step", "exp_avg", "exp_avg_sq")

Batch = TypeVar("Batch")


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


class TrainingTask(Protocol[Batch]):
    """Data, loss and optimizer of one training. All methods depend on their arguments alone."""

    weights: Mapping[str, Tensor]  # trained in place
    optimizer: Optimizer  # Adam or AdamW

    def batches(self, epoch: int) -> Sequence[Batch]:
        """Return the batches of an epoch, in order."""

    def learning_rate(self, progress: Progress, share_done: float) -> float:
        """Return the rate of the next step."""

    def loss(self, batch: Batch, progress: Progress) -> Tensor:
        """Return the loss of the next step, to differentiate."""

    def held_out_loss(self, progress: Progress) -> float:
        """Return the loss on held-out data, in nats."""


class TrainingLoop(Generic[Batch]):
    """Trains one task. It resumes at once if `state` has a state."""

    def __init__(self, task: TrainingTask[Batch], schedule: Schedule, state: StateFile | None = None) -> None:
        """Raises: CheckpointError if the state is damaged."""
        self.progress = Progress()
        self.best = _copied(task.weights)
        self._task, self._schedule, self._state = task, schedule, state
        self._batches: tuple[int, Sequence[Batch]] = (-1, ())  # an epoch and its batches
        self._saved_s, self._saving_s = time.monotonic(), 0.0
        if state is not None and (saved := state.load()) is not None:
            self.restore(Progress(**saved[1]["progress"]), saved[0])

    def run(self, on_step: Callable[[Progress], None] = lambda _: None) -> None:
        """Train to the end, then put the best weights in place. `on_step` is called after each step.

        The state is saved at the start, once a minute, on Ctrl-C and at the end. Raises: ConfigError if there is no
        batch, or the disk is full.
        """
        if not self.progress.steps:
            self._save()
        try:
            with torch_threads(self._schedule.num_threads):
                self._run(on_step)
        except KeyboardInterrupt:
            self._save()
            raise
        self._save()
        _write(self._task.weights, self.best)

    def _run(self, on_step: Callable[[Progress], None]) -> None:
        while True:
            if self._schedule.is_evaluation_due(self.progress):
                self._evaluate()
            if self._schedule.is_over(self.progress):
                break
            with hold_interrupts():
                self._step()
            on_step(self.progress)
            if time.monotonic() - self._saved_s > max(SAVE_EVERY_S, self._saving_s / SAVING_SHARE):
                self._save()
        if self.progress.evaluated_at < self.progress.steps:  # a limit within an epoch
            self._evaluate()

    def tensors(self) -> dict[str, Tensor]:
        """Return weights, best weights and the optimizer's state, not copied."""
        found: dict[str, Tensor] = {}
        for name, weight in self._task.weights.items():
            found |= {f"now.{name}": weight.detach(), f"best.{name}": self.best[name]}
            found |= {f"{key}.{name}": value for key, value in self._task.optimizer.state.get(weight, {}).items()}
        return found

    def restore(self, progress: Progress, tensors: Mapping[str, Tensor]) -> None:
        """Continue from this progress and its `tensors()`."""
        self.progress = progress
        weights = self._task.weights
        _write(weights, {name: tensors[f"now.{name}"] for name in weights})
        self.best = {name: tensors[f"best.{name}"].clone() for name in weights}
        for name, weight in weights.items():
            keys = [key for key in _ADAM_STATE if f"{key}.{name}" in tensors]
            if keys:  # a weight that had no gradient yet has no state
                self._task.optimizer.state[weight] = {key: tensors[f"{key}.{name}"].clone() for key in keys}

    def _step(self) -> None:
        start_s, now, task = time.perf_counter(), self.progress, self._task
        batches = self._batches_of(now.epoch)
        for group in task.optimizer.param_groups:
            group["lr"] = task.learning_rate(now, self._schedule.share_done(now, len(batches)))
        torch.autograd.backward(task.loss(batches[now.epoch_step], now))
        torch.nn.utils.clip_grad_norm_(list(task.weights.values()), _MAX_GRADIENT_NORM)
        task.optimizer.step()
        task.optimizer.zero_grad()
        epochs, epoch_step = divmod(now.epoch_step + 1, len(batches))
        spent_s = now.spent_s + time.perf_counter() - start_s
        self.progress = replace(
            now, epoch=now.epoch + epochs, epoch_step=epoch_step, steps=now.steps + 1, spent_s=spent_s
        )

    def _batches_of(self, epoch: int) -> Sequence[Batch]:
        if self._batches[0] != epoch:
            self._batches = (epoch, self._task.batches(epoch))
        if not self._batches[1]:
            raise ConfigError("there is too little text to learn from: add text (--data)")
        return self._batches[1]

    def _evaluate(self) -> None:
        start_s, now = time.perf_counter(), self.progress
        with torch.no_grad():
            loss = self._task.held_out_loss(now)
        with hold_interrupts():
            now = replace(now, evaluated_at=now.steps, spent_s=now.spent_s + time.perf_counter() - start_s)
            if loss < now.best_loss:
                self.best = _copied(self._task.weights)
                self.progress = replace(now, best_loss=loss, since_best=0)
            else:
                self.progress = replace(now, since_best=now.since_best + 1)

    def _save(self) -> None:
        if self._state is None:
            return
        start_s = time.monotonic()
        self._state.save(self.tensors(), {"progress": asdict(self.progress), "schedule": asdict(self._schedule)})
        self._saved_s = time.monotonic()
        self._saving_s = self._saved_s - start_s


def saved_schedule(state: StateFile) -> Schedule | None:
    """Return the schedule of a saved training; None if there is none. Raises: CheckpointError."""
    metadata: dict[str, Any] | None = state.metadata()
    return None if metadata is None else Schedule(**metadata["schedule"])


def limited(epochs: int | None, seconds: float) -> Schedule:
    """Return the schedule of a number of epochs, or else of a time."""
    return Schedule(seconds=seconds) if epochs is None else Schedule(epochs=epochs)


def cosine(share_done: float, last: float) -> float:
    """Return the share of the peak rate on half a cosine from 1 down to `last`."""
    return last + (1 - last) * (1 + math.cos(math.pi * share_done)) / 2


@contextmanager
def torch_threads(number: int | None) -> Iterator[None]:
    """Set the number of torch's threads inside the block; None: leave it."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _copied(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in weights.items()}


@torch.no_grad()
def _write(weights: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name, weight in weights.items():
        weight.copy_(values[name])
