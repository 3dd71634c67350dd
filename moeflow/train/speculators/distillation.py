"""Trains a pool of speculators for a model: collects text, trains one after the other, measures coverage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Final

import torch

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.checkpoint.identity import content_fingerprint
from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.errors import ConfigError
from moeflow.planner.choices.trained_speculators import speculators_folder
from moeflow.planner.hardware.host import host_resources
from moeflow.settings.settings import Settings
from moeflow.train.loop import TrainingLoop, saved_schedule
from moeflow.train.phases import OnProgress, Phase, ignore
from moeflow.train.schedule import Progress, Schedule
from moeflow.train.speculators.batches import split, vocabulary_of
from moeflow.train.speculators.coverage import coverage, is_covered
from moeflow.train.speculators.loss import boost_weights
from moeflow.train.speculators.prompts import read_texts
from moeflow.train.speculators.recipe import SpeculatorRecipe
from moeflow.train.speculators.saved_student import load_student, save_student
from moeflow.train.speculators.student import Student, student_from
from moeflow.train.speculators.teacher_text import Teacher, TeacherText, running_target
from moeflow.train.speculators.training import SpeculatorTask, predictions, stepped_schedule, timed_schedule
from moeflow.train.text_rounds import TextRounds
from moeflow.train.work_folder import StateFile, WorkFolder, digest_of, work_folder

TEXT_SHARE: Final = 0.4  # of the time, for the target's text
_NUM_LIKELIEST: Final = (1, 3)
_ANSWER_TOKENS: Final = 256


@dataclass(frozen=True, slots=True)
class Pool:
    """The trained speculators and their quality on held-out text."""

    folders: list[Path]
    text_tokens: int
    held_out_places: int
    coverage: dict[int, list[float]]  # of the first n speculators, by the number of likeliest tokens
    agreement: list[float]  # of each: the share of places with the target's likeliest token as its own


def train_speculators(
    settings: Settings,
    recipe: SpeculatorRecipe,
    *,
    out: Path | None = None,
    data: Path | None = None,
    overwrite: bool = False,
    restart: bool = False,
    on_progress: OnProgress = ignore,
) -> Pool:
    """Train speculators for `settings.model` and save them as `out`/1, 2, ...; resume unfinished work.

    Raises: CheckpointError, ConfigError, CapacityError; EngineError if the target fails.
    """
    model = Path(settings.model or "").absolute()
    place = (out or speculators_folder(model)).absolute()
    texts = read_texts(data)
    with closing(open_checkpoint(model)) as checkpoint, work_folder(place / ".training") as work:
        if restart:
            work.clear()
        student = student_from(checkpoint, recipe.layers)
        folders = [place / str(number + 1) for number in range(recipe.pool)]
        has_begun = _state(work, 0).path.exists()
        if not overwrite and not has_begun and (taken := [each for each in folders if each.exists()]):
            raise ConfigError(f"{taken[0]} exists already. Replace it (--overwrite), or choose another folder (--out)")
        inputs = {"weights of the model": content_fingerprint(checkpoint), "content of the texts": digest_of(texts)}
        work.check_recipe({"model": str(model), "data": str(data), **inputs, **asdict(recipe)})
        text = _text(settings, recipe, texts, work, on_progress)
        _train(student, checkpoint, text, recipe, work, folders, on_progress)
        pool = _measure(student, text, folders)
        work.clear()
    return pool


def _state(work: WorkFolder, number: int) -> StateFile:
    return work.file(f"training-{number}")


def _text(
    settings: Settings, recipe: SpeculatorRecipe, texts: list[str], work: WorkFolder, report: OnProgress
) -> TeacherText:
    """Return the target's text; generate the missing rounds."""
    seconds = recipe.minutes * 60 * TEXT_SHARE
    rounds = TextRounds(TeacherText, work, report, text_tokens=recipe.text_tokens, seconds=seconds)
    if not (_state(work, 0).path.exists() or rounds.is_enough):
        with running_target(settings, report) as (engine, _):
            teacher = Teacher(
                engine,
                texts,
                answer_tokens=_ANSWER_TOKENS,
                temperature=recipe.temperature,
                seed=recipe.seed,
                on_tokens=rounds.on_tokens,
            )
            rounds.collect(teacher.round)
    return TeacherText.joined(rounds.rounds)


def _train(
    student: Student,
    checkpoint: Checkpoint,
    text: TeacherText,
    recipe: SpeculatorRecipe,
    work: WorkFolder,
    folders: Sequence[Path],
    report: OnProgress,
) -> None:
    """Train and save all students, one after the other. A complete training ends at once."""
    learn, held_out = split(text)
    covered = torch.zeros(len(text.token_ids), dtype=torch.bool)
    vocabulary, _ = vocabulary_of(text, student.shape.vocab_size)
    for number, folder in enumerate(folders):
        seed, state = recipe.seed + number, _state(work, number)
        make = partial(SpeculatorTask, student, text, learn, held_out, boost_weights(covered), seed=seed)
        schedule = saved_schedule(state) or _schedule(recipe, make)
        task = make(schedule=schedule)
        TrainingLoop(task, schedule, state).run(_reporter(report, number, len(folders), schedule.steps or 1))
        save_student(task.student, vocabulary, checkpoint, folder, overwrite=True)
        if number + 1 < len(folders):
            found, where = predictions(load_student(student, folder), text, learn, 1)
            covered[where] |= is_covered([found], text.token_ids[where], 1)


def _reporter(report: OnProgress, number: int, pool: int, steps: int) -> Callable[[Progress], None]:
    return lambda progress: report(Phase.TRAINING, number * steps + progress.steps, pool * steps)


def _schedule(recipe: SpeculatorRecipe, make: Callable[..., SpeculatorTask]) -> Schedule:
    if recipe.steps is not None:
        return stepped_schedule(recipe.steps)
    budget_s = recipe.minutes * 60 * (1 - TEXT_SHARE) / recipe.pool
    return timed_schedule(make, budget_s, host_resources().num_cores)


def _measure(student: Student, text: TeacherText, folders: Sequence[Path]) -> Pool:
    """Return the quality of the saved pool on held-out text."""
    _, held_out = split(text)
    found = [predictions(load_student(student, folder), text, held_out, max(_NUM_LIKELIEST)) for folder in folders]
    where = found[0][1]
    said, likeliest = text.token_ids[where], text.likeliest[where, 0]
    each = [tokens for tokens, _ in found]
    return Pool(
        folders=list(folders),
        text_tokens=text.num_tokens,
        held_out_places=len(where),
        coverage={number: coverage(each, said, number) for number in _NUM_LIKELIEST},
        agreement=[coverage([tokens], likeliest, 1)[0] for tokens in each],
    )
