"""Trains one student on the target's text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor

from moeflow.train.examples import epoch_order
from moeflow.train.loop import TrainingLoop, TrainingTask
from moeflow.train.schedule import Progress, Schedule, cosine
from moeflow.train.speculators.batches import SequenceBatch, batches, vocabulary_of
from moeflow.train.speculators.loss import distillation_loss
from moeflow.train.speculators.student import FROZEN, Student
from moeflow.train.speculators.teacher_text import TeacherText

LEARNING_RATE: Final = 1.5e-3
_EVALUATIONS: Final = 20
_PATIENCE: Final = 4  # evaluations without a better loss
_WARM_UP: Final = 0.03  # of all steps
_LAST_RATE: Final = 0.05  # of the learning rate
_WEIGHT_DECAY: Final = 0.01
_BETAS: Final = (0.9, 0.95)
_EVALUATED: Final = 16  # held-out sequences of an evaluation
_TIMED_STEPS: Final = 2
_NUM_RARE: Final = 2048  # tokens that are drawn for a step


class SpeculatorTask(TrainingTask[SequenceBatch]):
    """Distillation into a student."""

    def __init__(
        self,
        student: Student,
        text: TeacherText,
        learn: Sequence[slice],
        held_out: Sequence[slice],
        place_weights: Tensor,
        *,
        seed: int,
        schedule: Schedule,
    ) -> None:
        """`place_weights` [N] float32 weighs each place of the text in the loss. `schedule` has a number of steps."""
        self._text, self._learn, self._held_out = text, learn, held_out
        self._place_weights, self._seed, self._schedule = place_weights, seed, schedule
        weights = {
            name: weight if name in FROZEN else weight.clone().requires_grad_()
            for name, weight in student.weights.items()
        }
        self.student = replace(student, weights=weights)
        self.weights = self.student.trained
        self.optimizer = torch.optim.AdamW(
            list(self.weights.values()), lr=LEARNING_RATE, betas=_BETAS, weight_decay=_WEIGHT_DECAY
        )
        self._tokens, self._table = vocabulary_of(text, student.shape.vocab_size)
        self._head = student.head[self._tokens]

    def batches(self, epoch: int) -> list[SequenceBatch]:
        """See `TrainingTask`."""
        order = epoch_order(len(self._learn), epoch, self._seed)
        return [batch for batch in batches(self._text, self._learn, order) if len(batch.places)]

    def learning_rate(self, progress: Progress, share_done: float) -> float:
        """Return a short linear rise, then half a cosine."""
        steps = self._schedule.steps or 1
        warm_up = max(round(_WARM_UP * steps), 1)
        falling = cosine(max(progress.steps - warm_up, 0) / max(steps - warm_up, 1), _LAST_RATE)
        return LEARNING_RATE * falling * min((progress.steps + 1) / warm_up, 1.0)

    def loss(self, batch: SequenceBatch, progress: Progress) -> Tensor:
        """Return the distillation loss over the frequent tokens and a few rare ones."""
        text, places = self._text, batch.next_places
        with torch.autocast("cpu", torch.bfloat16) if self._schedule.in_bfloat16 else nullcontext():
            hidden = self.student.hidden(batch.token_ids, batch.lengths)[batch.places]
            logits = torch.nn.functional.linear(hidden, torch.cat([self._head, self._rare(progress.steps)]))
        likeliest, said = self._table[text.likeliest[places]], self._table[text.token_ids[places]]
        return distillation_loss(logits, likeliest, text.logprobs[places], said, self._place_weights[places])

    def held_out_loss(self, progress: Progress) -> float:
        """See `TrainingTask`."""
        total, num_places = 0.0, 0
        for batch in batches(self._text, self._held_out, range(min(len(self._held_out), _EVALUATED))):
            total += float(self.loss(batch, progress)) * len(batch.places)
            num_places += len(batch.places)
        return total / max(num_places, 1)

    def _rare(self, step: int) -> Tensor:
        """Return head rows of rare tokens, new ones at each step: the student learns that they are unlikely."""
        chance = torch.Generator().manual_seed(self._seed * 1_000_003 + step)
        drawn = torch.randint(len(self._table), (_NUM_RARE,), generator=chance)
        return self.student.head[drawn[self._table[drawn] < 0]]


def stepped_schedule(steps: int) -> Schedule:
    """Return a schedule of a number of steps, in one thread and float32."""
    every = max(steps // _EVALUATIONS, 1)
    return Schedule(steps=steps, evaluate_every=every, patience=_PATIENCE, num_threads=1)


def timed_schedule(make: Callable[..., SpeculatorTask], budget_s: float, num_cores: int) -> Schedule:
    """Return a schedule that takes `budget_s`, with the threads and precision of the fastest steps.

    `make(schedule=...)` returns a new task.
    One thread is the fastest where other programs use the cores, since several threads wait for each other.
    """
    seconds: dict[Schedule, float] = {}
    for num_threads in sorted({1, num_cores}):
        for in_bfloat16 in (False, True):
            schedule = replace(stepped_schedule(_EVALUATIONS), num_threads=num_threads, in_bfloat16=in_bfloat16)
            seconds[schedule] = _step_s(make(schedule=schedule), schedule)
    fastest = min(seconds, key=seconds.__getitem__)
    whole = stepped_schedule(max(int(budget_s / seconds[fastest]), _EVALUATIONS))
    return replace(whole, num_threads=fastest.num_threads, in_bfloat16=fastest.in_bfloat16)


def _step_s(task: SpeculatorTask, schedule: Schedule) -> float:
    """Return the seconds of the fastest step but the first."""
    spent_s: list[float] = []
    short = replace(schedule, steps=1 + _TIMED_STEPS, evaluate_every=2 + _TIMED_STEPS)
    TrainingLoop(task, short).run(lambda progress: spent_s.append(progress.spent_s))
    return min(after - before for before, after in pairwise(spent_s))


@torch.no_grad()
def predictions(
    student: Student, text: TeacherText, sequences: Sequence[slice], num_likeliest: int
) -> tuple[Tensor, Tensor]:
    """Return a student's likeliest tokens at each place of the target's text, and the rows of these places.

    Only the frequent tokens are candidates, as in training.

    Shapes: -> [R, num_likeliest] int64, the likeliest first; [R] int64.
    """
    found: list[Tensor] = []
    where: list[Tensor] = []
    tokens, _ = vocabulary_of(text, student.shape.vocab_size)
    head = student.head[tokens]
    for batch in batches(text, sequences, range(len(sequences))):
        hidden = student.hidden(batch.token_ids, batch.lengths)[batch.places]
        logits = torch.nn.functional.linear(hidden, head)
        found.append(tokens[logits.topk(num_likeliest).indices])
        where.append(batch.next_places)
    return torch.cat(found), torch.cat(where)
