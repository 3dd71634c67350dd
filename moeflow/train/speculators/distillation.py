"""From a model to a pool of small ones that guess for it: text, then one training after the other, then coverage."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.errors import ConfigError
from moeflow.engine.engine import Engine
from moeflow.engine.text.tokenizer import Tokenizer
from moeflow.planner.choices.trained_speculators import speculators_folder
from moeflow.planner.hardware.host import host_resources
from moeflow.planner.planning import plan_for_start
from moeflow.planner.settings import Settings
from moeflow.planner.usage import OFFLINE
from moeflow.train.speculators.batches import split, vocabulary_of
from moeflow.train.speculators.coverage import coverage, is_covered
from moeflow.train.speculators.loss import boost_weights
from moeflow.train.speculators.prompts import around_a_question, prompts, read_texts
from moeflow.train.speculators.saved_student import load_student, save_student
from moeflow.train.speculators.student import Student, student_from
from moeflow.train.speculators.teacher_text import QUESTION_TOKENS, TeacherText, joined, say_round
from moeflow.train.speculators.training import Progress, Training, guesses, timed_start
from moeflow.train.speculators.work_folder import SpeculatorWork
from moeflow.train.work_folder import work_folder

TEXT_SHARE: Final = 0.4  # of the time, for the target's text
SAVE_EVERY_S: Final = 60.0
_NUM_LIKELIEST: Final = (1, 3)
_PROMPT_TOKENS: Final = 192
_ANSWER_TOKENS: Final = 256
_LEAST_CHAT: Final = 2 * QUESTION_TOKENS  # tokens of half a context, below which a model makes up no questions


class Phase(StrEnum):
    """What distillation is busy with, in order, and what its progress counts."""

    LOADING = "loading"  # bytes
    SAYING = "saying"  # seconds, or tokens where so many are wanted
    TRAINING = "training"  # steps


OnProgress = Callable[[Phase, int, int], None]  # phase, done, total


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculatorRecipe:
    """What decides the result, beside the target. Raises: ConfigError when a value is out of its range."""

    pool: int = 1
    layers: int = 6
    minutes: float = 25.0  # in all
    text_tokens: int | None = None  # that the target says, whatever the time; None: as many as the time allows
    steps: int | None = None  # of each training, likewise
    temperature: float = 0.8  # of the target's text
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, least in (("pool", self.pool, 1), ("layers", self.layers, 1)):
            if value < least:
                raise ConfigError(f"{name} is {value}; it must be at least {least}")
        if not 0 < self.minutes <= 100_000:
            raise ConfigError(f"minutes is {self.minutes:g}; it must be above 0")
        for name, number in (("text-tokens", self.text_tokens), ("steps", self.steps)):
            if number is not None and number < 1:
                raise ConfigError(f"{name} is {number}; it must be at least 1")
        if not 0 <= self.temperature <= 2:
            raise ConfigError(f"temperature is {self.temperature:g}; it must lie from 0 to 2")


@dataclass(frozen=True, slots=True)
class Pool:
    """What was trained, and how well it guesses text that was held out."""

    folders: list[Path]
    text_tokens: int
    held_out_places: int
    coverage: dict[int, list[float]]  # by how many likeliest tokens count: of the first n speculators
    agreement: list[float]  # of each: how often its likeliest token is the target's


def train_speculators(
    settings: Settings,
    recipe: SpeculatorRecipe,
    *,
    out: Path | None = None,
    data: Path | None = None,
    overwrite: bool = False,
    restart: bool = False,
    on_progress: OnProgress | None = None,
) -> Pool:
    """Train speculators for `settings.model` and save them as `out`/1, 2, ...; unfinished work is gone on with.

    Raises: CheckpointError, ConfigError, CapacityError; EngineError if the target fails.
    """
    report = on_progress or (lambda phase, done, total: None)
    model = Path(settings.model or "").absolute()
    place = (out or speculators_folder(model)).absolute()
    texts = read_texts(data)
    with closing(open_checkpoint(model)) as checkpoint, work_folder(place / ".training") as folder:
        work = SpeculatorWork(folder)
        if restart:
            folder.clear()
        student = student_from(checkpoint, recipe.layers)
        folders = [place / str(number + 1) for number in range(recipe.pool)]
        if not overwrite and work.training(0) is None and (taken := [each for each in folders if each.exists()]):
            raise ConfigError(f"{taken[0]} exists already. Replace it (--overwrite), or choose another place (--out)")
        folder.check_recipe({"model": str(model), "data": str(data), **asdict(recipe)})
        text = _text(settings, recipe, texts, work, report)
        _Pool(student, checkpoint, text, recipe, work, folders, report).train()
        pool = _measure(student, text, folders)
        folder.clear()
    return pool


def _text(
    settings: Settings, recipe: SpeculatorRecipe, texts: list[str], work: SpeculatorWork, report: OnProgress
) -> TeacherText:
    """Return the target's text: what there is of it, and what is missing."""
    found = work.texts()
    if work.training(0) is not None:
        return joined(found)
    budget_s = recipe.minutes * 60 * TEXT_SHARE
    said = sum(text.num_said for text in found)
    if recipe.text_tokens is not None and said >= recipe.text_tokens:
        return joined(found)
    began_s = time.monotonic()
    with _engine(settings, report) as engine:
        tokenizer = Tokenizer.load(engine.config.model_path)
        longest = max(engine.config.scheduler.max_model_len // 2 - 1, 1)
        chat = around_a_question(tokenizer) if longest > _LEAST_CHAT else None

        def on_tokens(number: int) -> None:
            nonlocal said
            said += number
            done, total = time.monotonic() - began_s, budget_s
            if recipe.text_tokens is not None:
                done, total = said, recipe.text_tokens
            if done < total:
                report(Phase.SAYING, int(done), int(total) + 1)

        while not found or not _suffices(recipe, said, time.monotonic() - began_s, budget_s):
            number = len(found)
            asked = prompts(
                texts, tokenizer, max_tokens=min(_PROMPT_TOKENS, longest), seed=recipe.seed * 1_000_003 + number
            )
            text = say_round(
                engine,
                asked,
                number,
                chat=chat,
                max_tokens=_ANSWER_TOKENS,
                temperature=recipe.temperature,
                on_tokens=on_tokens,
            )
            work.add_text(text, number)
            found.append(text)
    report(Phase.SAYING, said, said)
    return joined(found)


def _suffices(recipe: SpeculatorRecipe, said: int, spent_s: float, budget_s: float) -> bool:
    return spent_s >= budget_s if recipe.text_tokens is None else said >= recipe.text_tokens


@contextmanager
def _engine(settings: Settings, report: OnProgress) -> Iterator[Engine]:
    plan = plan_for_start(settings, OFFLINE)
    engine = Engine.load(plan.config, lambda done, total: report(Phase.LOADING, done, total))
    try:
        yield engine
    finally:
        engine.close()


class _Pool:
    """The trainings, one after the other."""

    def __init__(
        self,
        student: Student,
        checkpoint: Checkpoint,
        text: TeacherText,
        recipe: SpeculatorRecipe,
        work: SpeculatorWork,
        folders: Sequence[Path],
        report: OnProgress,
    ) -> None:
        self._student, self._checkpoint, self._text, self._recipe = student, checkpoint, text, recipe
        self._work, self._folders, self._report = work, folders, report
        self._learn, self._held_out = split(text)

    def train(self) -> None:
        """Train what is not trained yet."""
        covered = torch.zeros(len(self._text.token_ids), dtype=torch.bool)
        vocabulary, _ = vocabulary_of(self._text, self._student.shape.vocab_size)
        for number, folder in enumerate(self._folders):
            kept = self._work.training(number)
            trained = self._train_one(number, boost_weights(covered), kept)  # at once, if it was over already
            save_student(trained, vocabulary, self._checkpoint, folder, overwrite=True)
            if number + 1 < len(self._folders):
                saved = load_student(self._student, folder)
                found, where = guesses(saved, self._text, self._learn, 1)
                covered[where] |= is_covered([found], self._text.token_ids[where], 1)

    def _train_one(self, number: int, weights: Tensor, kept: tuple[Progress, dict[str, Tensor]] | None) -> Student:
        def make(progress: Progress) -> Training:
            seed = self._recipe.seed + number
            return Training(
                self._student, self._text, self._learn, self._held_out, weights, seed=seed, progress=progress
            )

        training = make(kept[0] if kept is not None else self._start(make))
        if kept is not None:
            training.restore(kept[1])
        saved_s = time.monotonic()
        total = training.progress.num_steps * len(self._folders)

        def on_step(progress: Progress) -> None:
            nonlocal saved_s
            self._report(Phase.TRAINING, number * progress.num_steps + progress.step, total)
            if time.monotonic() - saved_s > SAVE_EVERY_S:
                self._work.save_training(number, progress, training.tensors())
                saved_s = time.monotonic()

        training.run(on_step)
        self._work.save_training(number, training.progress, training.tensors())
        return training.best_student()

    def _start(self, make: Callable[[Progress], Training]) -> Progress:
        if self._recipe.steps is not None:
            return Progress(self._recipe.steps)
        budget_s = self._recipe.minutes * 60 * (1 - TEXT_SHARE) / self._recipe.pool
        return timed_start(make, budget_s, host_resources().num_cores)


def _measure(student: Student, text: TeacherText, folders: Sequence[Path]) -> Pool:
    """Return how well the pool guesses held-out text, with the weights as they were saved."""
    _, held_out = split(text)
    found = [guesses(load_student(student, folder), text, held_out, max(_NUM_LIKELIEST)) for folder in folders]
    where = found[0][1]
    said, likeliest = text.token_ids[where], text.likeliest[where, 0]
    each = [tokens for tokens, _ in found]
    return Pool(
        folders=list(folders),
        text_tokens=text.num_said,
        held_out_places=len(where),
        coverage={number: coverage(each, said, number) for number in _NUM_LIKELIEST},
        agreement=[coverage([tokens], likeliest, 1)[0] for tokens in each],
    )
