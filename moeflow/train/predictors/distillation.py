"""From a model to a predictor of its experts: text, what its routers say of it, training, and how often it hits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, cast

import torch

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.errors import ConfigError
from moeflow.engine.engine import Engine
from moeflow.engine.model_runner import ModelRunner
from moeflow.engine.runner_loading import load_runner
from moeflow.engine.text.tokenizer import Tokenizer
from moeflow.models.expert_predictor.network import ExpertPredictor, PredictorShape
from moeflow.models.expert_predictor.saved import is_saved, predictor_folder, save_predictor
from moeflow.models.language_model import LanguageModel
from moeflow.models.registry import read_model_config
from moeflow.planner.planning import plan_for_start
from moeflow.planner.settings import Settings
from moeflow.planner.usage import OFFLINE
from moeflow.train.predictors.hit_rates import HitRates, count_uses, hit_rates
from moeflow.train.predictors.learning_text import LearningText, ModelsText, UsersText
from moeflow.train.predictors.routed_text import RoutedText, joined, routed
from moeflow.train.predictors.training import Embeddings, Limits, Progress, Training, guesses, split
from moeflow.train.work_folder import WorkFolder, work_folder

TEXT_SHARE: Final = 0.5  # of the time, for text and what routers say of it
SAVE_EVERY_S: Final = 60.0
NUM_KEPT: Final = 30  # logits of a token and layer, the paper's T
_TRAINING: Final = "training"
_EMBEDDINGS: Final = "model.embed_tokens.weight"
_SHARED_EMBEDDINGS: Final = "shared.weight"  # of an encoder-decoder


class Phase(StrEnum):
    """What distillation is busy with, in order, and what its progress counts."""

    LOADING = "loading"  # bytes
    TEXT = "routing text"  # seconds, or tokens where so many are wanted
    TRAINING = "training"  # seconds, or epochs where so many are wanted


OnProgress = Callable[[Phase, int, int], None]  # phase, done, total


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictorRecipe:
    """What decides the result, beside the model. Raises: ConfigError when a value is out of its range."""

    minutes: float = 20.0  # in all
    text_tokens: int | None = None  # whatever the time; None: as many as the time allows
    epochs: int | None = None  # at most; None: as many as the time allows
    learning_rate: float = 1e-3  # the paper has 5e-5, and trains for longer
    batch_size: int = 64  # pieces of text
    hidden_size: int = 256
    window: int = 128  # tokens that attention sees
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("text_tokens", "epochs", "batch_size", "hidden_size", "window"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name.replace('_', '-')} is {value}; it must be at least 1")
        if not 0 < self.minutes <= 100_000:
            raise ConfigError(f"minutes is {self.minutes:g}; it must be above 0")
        if not 0 < self.learning_rate <= 1:
            raise ConfigError(f"learning-rate is {self.learning_rate:g}; it must be above 0, and 1 at most")

    @property
    def limits(self) -> Limits:
        """How long to train: a number of epochs takes the time that it takes."""
        seconds = self.minutes * 60 * (1 - TEXT_SHARE)
        return Limits(seconds=seconds) if self.epochs is None else Limits(epochs=self.epochs)


@dataclass(frozen=True, slots=True)
class TrainedPredictor:
    """What was trained, and how often it hits on text that was held out."""

    folder: Path
    text_tokens: int
    held_out_tokens: int
    epochs: int
    loss: float  # of the best epoch on held-out text, in nats
    top_k: int
    hit_rates: HitRates

    def in_figures(self) -> dict[str, Any]:
        """Return all but the place, as JSON has it."""
        figures = asdict(self)
        del figures["folder"]
        figures["mean_hit_rates"] = self.hit_rates.mean()
        return figures


def train_predictor(
    settings: Settings,
    recipe: PredictorRecipe,
    *,
    out: Path | None = None,
    data: Path | None = None,
    overwrite: bool = False,
    restart: bool = False,
    on_progress: OnProgress | None = None,
) -> TrainedPredictor:
    """Train a predictor for `settings.model` and save it; unfinished work is gone on with.

    Raises: CheckpointError, ConfigError, CapacityError; EngineError if the model fails.
    """
    report = on_progress or (lambda phase, done, total: None)
    model = Path(settings.model or "").absolute()
    folder = (out or predictor_folder(model)).absolute()
    with closing(open_checkpoint(model)) as checkpoint:
        shape = _shape(checkpoint, recipe, data)
        with work_folder(folder / ".training") as work:
            if restart:
                work.clear()
            if not overwrite and work.load(_TRAINING) is None and is_saved(folder):
                raise ConfigError(f"{folder} exists already. Replace it (--overwrite), or choose another place (--out)")
            work.check_recipe({"model": str(model), "data": str(data), **asdict(recipe)})
            text = _Collecting(settings, recipe, shape, data, work, report).text()
            training = _training(checkpoint, shape, text, recipe)
            _train(training, recipe, work, report)
            trained = _measured(training, text, folder)
            save_predictor(training.best_predictor(), checkpoint, folder, trained.in_figures())
            work.clear()
    return trained


def _shape(checkpoint: Checkpoint, recipe: PredictorRecipe, data: Path | None) -> PredictorShape:
    config = read_model_config(checkpoint)
    num_layers = config.num_moe_layers if config.encoder is None else config.num_encoder_moe_layers
    if not num_layers:
        which = "no experts" if config.encoder is None else "no experts in its encoder"
        raise ConfigError(f"{checkpoint.path} has {which}: there is nothing to predict")
    if config.encoder is not None and data is None:
        raise ConfigError(
            f"{checkpoint.path} has an encoder, which makes up no inputs to learn from: give some (--data)"
        )
    return PredictorShape(
        embedding_size=config.hidden_size,
        num_layers=num_layers,
        num_experts=config.num_experts,
        top_k=config.top_k,
        hidden_size=recipe.hidden_size,
        window=recipe.window,
        is_causal=config.encoder is None,
    )


class _Collecting:
    """Text with what routers say of it: what there is, and what is missing."""

    def __init__(
        self,
        settings: Settings,
        recipe: PredictorRecipe,
        shape: PredictorShape,
        data: Path | None,
        work: WorkFolder,
        report: OnProgress,
    ) -> None:
        self._settings, self._recipe, self._shape = settings, recipe, shape
        self._data, self._work, self._report = data, work, report
        self._found: list[RoutedText] = []
        while (kept := work.load(_text_name(len(self._found)))) is not None:
            self._found.append(RoutedText(**kept[0]))
        self._began_s = time.monotonic()

    def text(self) -> RoutedText:
        """Return all of it. Blocks: until it is there."""
        if self._work.load(_TRAINING) is None and not (self._found and self._suffices):
            with _running(self._settings, self._report) as (engine, runner):
                self._began_s = time.monotonic()
                self._collect(engine, runner)
            self._report(Phase.TEXT, self._num_tokens, self._num_tokens)
        if not self._found:
            raise ConfigError("there is no text to learn from: give more (--data)")
        return joined(self._found)

    def _collect(self, engine: Engine, runner: ModelRunner) -> None:
        source = self._source(engine)
        num_kept = min(NUM_KEPT, self._shape.num_experts)
        while not self._found or not self._suffices:
            sequences = source.round(len(self._found))
            if not sequences:
                return
            text = routed(cast(LanguageModel, runner.model), sequences, num_kept, self._on_tokens)
            self._work.save(_text_name(len(self._found)), text.tensors())
            self._found.append(text)

    def _source(self, engine: Engine) -> LearningText:
        tokenizer = Tokenizer.load(engine.config.model_path)
        if self._data is None:
            return ModelsText(engine, tokenizer, self._recipe.seed, self._on_tokens)
        encoder = engine.model.encoder
        longest = engine.model.max_model_len if encoder is None else encoder.max_input_tokens
        return UsersText(self._data, tokenizer, longest, self._recipe.seed)

    def _on_tokens(self, _: int) -> None:
        done, total = time.monotonic() - self._began_s, self._budget_s
        if self._recipe.text_tokens is not None:
            done, total = self._num_tokens, self._recipe.text_tokens
        if done < total:
            self._report(Phase.TEXT, int(done), int(total) + 1)

    @property
    def _num_tokens(self) -> int:
        return sum(len(text.token_ids) for text in self._found)

    @property
    def _budget_s(self) -> float:
        return self._recipe.minutes * 60 * TEXT_SHARE

    @property
    def _suffices(self) -> bool:
        if self._recipe.text_tokens is not None:
            return self._num_tokens >= self._recipe.text_tokens
        return time.monotonic() - self._began_s >= self._budget_s


@contextmanager
def _running(settings: Settings, report: OnProgress) -> Iterator[tuple[Engine, ModelRunner]]:
    plan = plan_for_start(settings, OFFLINE)
    with closing(load_runner(plan.config, lambda done, total: report(Phase.LOADING, done, total))) as runner:
        yield Engine.over(plan.config, runner), runner


def _training(checkpoint: Checkpoint, shape: PredictorShape, text: RoutedText, recipe: PredictorRecipe) -> Training:
    torch.manual_seed(recipe.seed)
    has_encoder = read_model_config(checkpoint).encoder is not None
    rows = checkpoint.read(_SHARED_EMBEDDINGS if has_encoder else _EMBEDDINGS)
    used = torch.unique(text.token_ids)
    places = torch.zeros(len(rows), dtype=torch.int64)
    places[used] = torch.arange(len(used))
    return Training(
        ExpertPredictor(shape),
        text,
        Embeddings(rows[used].float(), places),
        learning_rate=recipe.learning_rate,
        batch_sequences=recipe.batch_size,
        seed=recipe.seed,
    )


def _train(training: Training, recipe: PredictorRecipe, work: WorkFolder, report: OnProgress) -> None:
    if (kept := work.load(_TRAINING)) is not None:
        training.restore(Progress(**kept[1]["progress"]), kept[0])
    saved_s = time.monotonic()

    def save() -> None:
        work.save(_TRAINING, training.tensors(), {"progress": asdict(training.progress)})

    def on_step(progress: Progress) -> None:
        nonlocal saved_s
        done, total = progress.spent_s, recipe.limits.seconds
        if recipe.epochs is not None:
            done, total = progress.epoch, recipe.epochs
        report(Phase.TRAINING, int(min(done, total)), int(total))
        if time.monotonic() - saved_s > SAVE_EVERY_S:
            save()
            saved_s = time.monotonic()

    save()  # from here on the text is complete
    training.run(recipe.limits, on_step)
    save()


@torch.inference_mode()
def _measured(training: Training, text: RoutedText, folder: Path) -> TrainedPredictor:
    predictor = training.best_predictor().eval()
    shape = predictor.shape
    learn, held_out = split(text)
    logits = torch.cat([guesses(predictor, text, training.embeddings, [where]) for where in held_out])
    experts, seen = (torch.cat([text.experts[where] for where in part]).long() for part in (held_out, learn))
    return TrainedPredictor(
        folder=folder,
        text_tokens=len(text.token_ids),
        held_out_tokens=len(experts),
        epochs=training.progress.epoch,
        loss=training.progress.best_loss,
        top_k=shape.top_k,
        hit_rates=hit_rates(logits, experts, shape.top_k, count_uses(seen, shape.num_experts, shape.top_k)),
    )


def _text_name(number: int) -> str:
    return f"text-{number:05d}"
