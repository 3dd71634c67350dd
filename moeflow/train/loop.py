"""The one training loop: steps, evaluation on held-out data, early stopping, a time budget, and resuming.

It is ours because transformers' Trainer and Lightning Fabric do not resume a time budget to the same bits. Both add a
dependency and seconds of import.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any, Final, Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from moeflow.core.errors import CheckpointError, ConfigError
from moeflow.kernels.interrupts import hold_interrupts
from moeflow.train.schedule import Progress, Schedule
from moeflow.train.work_folder import StateFile

SAVE_EVERY_S: Final = 60.0
SAVING_SHARE: Final = 0.1  # of the time, at most: the state of a large network takes seconds to write
_MAX_GRADIENT_NORM: Final = 1.0
_ADAM_STATE: Final = ("step", "exp_avg", "exp_avg_sq")

Batch = TypeVar("Batch")


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
        """Raises: CheckpointError if the state is damaged, or of another version."""
        self.progress = Progress()
        self.best = _copied(task.weights)
        self._task, self._schedule, self._state = task, schedule, state
        self._batches: tuple[int, Sequence[Batch]] = (-1, ())  # an epoch and its batches
        self._saved_s, self._saving_s = time.monotonic(), 0.0
        if state is not None and (saved := state.load()) is not None:
            self.restore(_progress_of(saved[1], state), saved[0])

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


@contextmanager
def torch_threads(number: int | None) -> Iterator[None]:
    """Set the number of torch's threads inside the block; None: leave it."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _progress_of(metadata: Mapping[str, Any], state: StateFile) -> Progress:
    try:
        return Progress(**metadata["progress"])
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            "is of another version", file=state.path, remedy="Start this training again (--restart)"
        ) from error


def _copied(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in weights.items()}


@torch.no_grad()
def _write(weights: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name, weight in weights.items():
        weight.copy_(values[name])
