"""Trains one student on the teacher's text: steps, looks at held-out text, an early stop, and a state to go on from."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Final

import torch
from torch import Tensor

from moeflow.train.kept_training import copied, kept_tensors, restore_tensors
from moeflow.train.speculators.batches import Batch, batches, epoch_order, vocabulary_of
from moeflow.train.speculators.loss import distillation_loss
from moeflow.train.speculators.student import FROZEN, Student
from moeflow.train.speculators.teacher_text import TeacherText

LEARNING_RATE: Final = 1.5e-3
_WARM_UP: Final = 0.03  # of all steps
_LEAST_RATE: Final = 0.05  # of the learning rate, at the end
_WEIGHT_DECAY: Final = 0.01
_BETAS: Final = (0.9, 0.95)
_LONGEST_GRADIENT: Final = 1.0
_LOOKS: Final = 20  # at held-out text, in all of a training
_PATIENCE: Final = 4  # looks without a better loss that end it
_LOOKED_AT: Final = 16  # sequences that are held out, at each look
_TIMED_STEPS: Final = 2
_NUM_OTHERS: Final = 2048  # tokens that are drawn for a step, those that occur among them left out


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a training is."""

    num_steps: int  # that it will have
    in_bfloat16: bool = False  # matrix products
    num_threads: int = 1
    step: int = 0
    best_loss: float = math.inf  # on held-out text, in nats
    best_step: int = 0
    looks_since: int = 0  # the best one
    spent_s: float = 0.0

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to do."""
        return self.step >= self.num_steps or self.looks_since >= _PATIENCE


class Training:
    """A student that is learning."""

    def __init__(
        self,
        student: Student,
        text: TeacherText,
        learn: Sequence[slice],
        held_out: Sequence[slice],
        place_weights: Tensor,
        *,
        seed: int,
        progress: Progress,
    ) -> None:
        """`place_weights` [N] float32 is what each place of the text counts."""
        self.progress, self._text, self._learn, self._held_out = progress, text, learn, held_out
        self._weights, self._seed = place_weights, seed
        self.student = replace(
            student,
            weights={
                name: weight if name in FROZEN else weight.clone().requires_grad_()
                for name, weight in student.weights.items()
            },
        )
        self.best = copied(self.student.trained)
        parameters = list(self.student.trained.values())
        self._optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, betas=_BETAS, weight_decay=_WEIGHT_DECAY)
        self._tokens, self._table = vocabulary_of(text, student.shape.vocab_size)
        self._head = student.head[self._tokens]

    def run(self, on_step: Callable[[Progress], None]) -> None:
        """Go on to the end; `on_step` is called after each step, when state may be taken."""
        with torch_threads(self.progress.num_threads):
            self._run(on_step)

    def _run(self, on_step: Callable[[Progress], None]) -> None:
        every = max(self.progress.num_steps // _LOOKS, 1)
        for batch in self._from_here():
            if self.progress.is_over:
                return
            start_s = time.perf_counter()
            self._step(batch)
            self.progress = replace(self.progress, step=self.progress.step + 1)
            if self.progress.step % every == 0 or self.progress.step == self.progress.num_steps:
                self._look()
            spent_s = self.progress.spent_s + time.perf_counter() - start_s
            self.progress = replace(self.progress, spent_s=spent_s)
            on_step(self.progress)

    def step_s(self) -> float:
        """Return how long a step takes, the first left out; the student has learned from these."""
        took: list[float] = []
        with torch_threads(self.progress.num_threads):
            for batch in islice(self._from_here(), 1 + _TIMED_STEPS):
                start_s = time.perf_counter()
                self._step(batch)
                took.append(time.perf_counter() - start_s)
        return min(took[1:])

    def best_student(self) -> Student:
        """Return the student as it was when it did best on held-out text."""
        return replace(self.student, weights={**self.student.weights, **self.best})

    def tensors(self) -> dict[str, Tensor]:
        """Return all that the rest of the training depends on, beside `progress`."""
        return kept_tensors(self.student.trained, self.best, self._optimizer)

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Go back to where `tensors` were taken."""
        restore_tensors(self.student.trained, self.best, self._optimizer, tensors)

    def _from_here(self) -> Iterator[Batch]:
        """Yield the batches of all epochs, from the step that comes next."""
        left = self.progress.step
        for epoch in count():
            order = epoch_order(len(self._learn), epoch, self._seed)
            for batch in batches(self._text, self._learn, order):
                if not len(batch.places):
                    continue
                if left:
                    left -= 1
                else:
                    yield batch

    def _step(self, batch: Batch) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = LEARNING_RATE * rate_share(self.progress.step, self.progress.num_steps)
        torch.autograd.backward(self._loss(batch))
        torch.nn.utils.clip_grad_norm_(list(self.student.trained.values()), _LONGEST_GRADIENT)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _loss(self, batch: Batch) -> Tensor:
        text, places = self._text, batch.next_places
        with computing(self.progress.in_bfloat16):
            hidden = self.student.hidden(batch.token_ids, batch.lengths)[batch.places]
            logits = torch.nn.functional.linear(hidden, torch.cat([self._head, self._others()]))
        likeliest, said = self._table[text.likeliest[places]], self._table[text.token_ids[places]]
        return distillation_loss(logits, likeliest, text.logprobs[places], said, self._weights[places])

    def _others(self) -> Tensor:
        """Return the head of tokens that occur seldom, others in each step: it is learnt that they are unlikely."""
        chance = torch.Generator().manual_seed(self._seed * 1_000_003 + self.progress.step)
        drawn = torch.randint(len(self._table), (_NUM_OTHERS,), generator=chance)
        return self.student.head[drawn[self._table[drawn] < 0]]

    def _look(self) -> None:
        """Measure on held-out text, and keep the student if it is the best so far."""
        total, num_places = 0.0, 0
        with torch.no_grad():
            for batch in batches(self._text, self._held_out, range(min(len(self._held_out), _LOOKED_AT))):
                total += float(self._loss(batch)) * len(batch.places)
                num_places += len(batch.places)
        loss = total / max(num_places, 1)
        now = self.progress
        if loss < now.best_loss:
            self.best = copied(self.student.trained)
            self.progress = replace(now, best_loss=loss, best_step=now.step, looks_since=0)
        else:
            self.progress = replace(now, looks_since=now.looks_since + 1)


def rate_share(step: int, num_steps: int) -> float:
    """Return what share of the learning rate a step has: a short rise, then half a cosine."""
    warm_up = max(round(_WARM_UP * num_steps), 1)
    if step < warm_up:
        return (step + 1) / warm_up
    share = (step - warm_up) / max(num_steps - warm_up, 1)
    return _LEAST_RATE + (1 - _LEAST_RATE) * (1 + math.cos(math.pi * share)) / 2


@contextmanager
def torch_threads(number: int) -> Iterator[None]:
    """Have torch compute in so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def computing(in_bfloat16: bool) -> torch.autocast | nullcontext[None]:
    """Return what makes matrix products narrow, or nothing."""
    return torch.autocast("cpu", torch.bfloat16) if in_bfloat16 else nullcontext()


def timed_start(make: Callable[[Progress], Training], budget_s: float, num_cores: int) -> Progress:
    """Return the start of a training that takes so long, in the way in which steps are fastest here and now.

    Where other programs have the cores, one thread is faster than several, which wait for each other all the time.
    """
    seconds: dict[Progress, float] = {}
    for num_threads in sorted({1, num_cores}):
        for in_bfloat16 in (False, True):
            way = Progress(_LOOKS * _TIMED_STEPS, in_bfloat16, num_threads)
            seconds[way] = make(way).step_s()
    fastest = min(seconds, key=seconds.__getitem__)
    return replace(fastest, num_steps=max(int(budget_s / seconds[fastest]), _LOOKS))


@torch.no_grad()
def guesses(
    student: Student, text: TeacherText, sequences: Sequence[slice], num_likeliest: int
) -> tuple[Tensor, Tensor]:
    """Return what a student guesses at each place whose token the target said, and which places of the text these are.

    It guesses among the tokens that it learns to tell apart.

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
