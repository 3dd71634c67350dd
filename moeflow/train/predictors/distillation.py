"""From a model to a predictor of its experts: text, what its routers say of it, training, and how often it hits.

An encoder-decoder gets two, one for each of its stacks that has experts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.errors import ConfigError
from moeflow.models.expert_predictor.embeddings import read_embeddings
from moeflow.models.expert_predictor.network import ExpertPredictor, PredictorShape
from moeflow.models.expert_predictor.saved import decoder_folder, is_saved, predictor_folder, save_predictor
from moeflow.models.registry import read_model_config
from moeflow.planner.settings import Settings
from moeflow.train.predictors.collecting import TRAINING, Collecting
from moeflow.train.predictors.hit_rates import HitRates, count_uses, hit_rates
from moeflow.train.predictors.recipe import OnProgress, Phase, PredictorRecipe
from moeflow.train.predictors.routed_text import RoutedText
from moeflow.train.predictors.training import Embeddings, Progress, Training, guesses, in_groups, split
from moeflow.train.work_folder import WorkFolder, work_folder

SAVE_EVERY_S: Final = 60.0


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
    decoder: TrainedPredictor | None = None  # of a model that has an encoder, whose predictor the rest is about

    def in_figures(self) -> dict[str, Any]:
        """Return all but the place, as JSON has it."""
        figures = {name: getattr(self, name) for name in self.__slots__ if name not in ("folder", "decoder")}
        figures |= {"hit_rates": asdict(self.hit_rates), "mean_hit_rates": self.hit_rates.mean()}
        return figures | ({} if self.decoder is None else {"decoder": self.decoder.in_figures()})


@dataclass(frozen=True, slots=True)
class _Part:
    """A stack of layers with experts, and what predicts these."""

    shape: PredictorShape
    folder: Path
    is_behind_encoder: bool = False  # a decoder that continues from an input

    @property
    def work(self) -> Path:
        """Where unfinished work lies."""
        return self.folder / ".training"

    @property
    def is_begun(self) -> bool:
        """Whether there is some."""
        return (self.work / "recipe.json").exists()


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
        parts = list(_parts(checkpoint, recipe, data, folder))
        if restart:
            for part in parts:
                if part.is_begun:
                    with work_folder(part.work) as work:
                        work.clear()
        todo = _to_do(parts, overwrite=overwrite)
        each = replace(recipe, minutes=recipe.minutes / len(parts))
        trained = [_train_part(checkpoint, part, settings, each, model, data, report) for part in todo]
    return replace(trained[0], decoder=trained[1]) if len(trained) > 1 else trained[0]


def _to_do(parts: Sequence[_Part], *, overwrite: bool) -> Sequence[_Part]:
    """Return the parts from the one on whose work is unfinished; if none is, all.

    Raises: ConfigError if one is there already.
    """
    begun = [number for number, part in enumerate(parts) if part.is_begun]
    if begun:
        return parts[begun[-1] :]
    if not overwrite and (there := [part.folder for part in parts if is_saved(part.folder)]):
        raise ConfigError(f"{there[0]} exists already. Replace it (--overwrite), or choose another place (--out)")
    return parts


def _train_part(
    checkpoint: Checkpoint,
    part: _Part,
    settings: Settings,
    recipe: PredictorRecipe,
    model: Path,
    data: Path | None,
    report: OnProgress,
) -> TrainedPredictor:
    with work_folder(part.work) as work:
        work.check_recipe({"model": str(model), "data": str(data), **asdict(recipe)})
        collecting = Collecting(
            settings, recipe, part.shape, data, work, report, is_behind_encoder=part.is_behind_encoder
        )
        text = collecting.text()
        training = _training(checkpoint, part.shape, text, recipe)
        _train(training, recipe, work, report)
        trained = _measured(training, text, part.folder)
        save_predictor(training.best_predictor(), checkpoint, part.folder, trained.in_figures())
        work.clear()
    return trained


def _parts(checkpoint: Checkpoint, recipe: PredictorRecipe, data: Path | None, folder: Path) -> Iterator[_Part]:
    """Yield what has experts to be predicted, of which there is at least one. Raises: ConfigError."""
    config = read_model_config(checkpoint)
    if not config.num_moe_layers:
        raise ConfigError(f"{checkpoint.path} has no experts: there is nothing to predict")
    if config.encoder is not None and data is None:
        raise ConfigError(
            f"{checkpoint.path} has an encoder, which makes up no inputs to learn from: give some (--data)"
        )
    shape = PredictorShape(
        embedding_size=config.hidden_size,
        num_layers=config.num_moe_layers - config.num_encoder_moe_layers,
        num_experts=config.num_experts,
        top_k=config.top_k,
        hidden_size=recipe.hidden_size,
        window=recipe.window,
    )
    if config.num_encoder_moe_layers:
        yield _Part(replace(shape, num_layers=config.num_encoder_moe_layers, is_causal=False), folder)
    if shape.num_layers:
        has_encoder = config.encoder is not None
        yield _Part(shape, decoder_folder(folder) if has_encoder else folder, is_behind_encoder=has_encoder)


def _training(checkpoint: Checkpoint, shape: PredictorShape, text: RoutedText, recipe: PredictorRecipe) -> Training:
    torch.manual_seed(recipe.seed)
    rows = read_embeddings(checkpoint)
    used = torch.unique(text.token_ids)
    places = torch.zeros(len(rows), dtype=torch.int64)
    places[used] = torch.arange(len(used))
    return Training(
        ExpertPredictor(shape),
        text,
        Embeddings(rows[used], places),
        learning_rate=recipe.learning_rate,
        batch_sequences=recipe.batch_size,
        seed=recipe.seed,
    )


def _train(training: Training, recipe: PredictorRecipe, work: WorkFolder, report: OnProgress) -> None:
    if (kept := work.load(TRAINING)) is not None:
        training.restore(Progress(**kept[1]["progress"]), kept[0])
    saved_s = time.monotonic()

    def save() -> None:
        work.save(TRAINING, training.tensors(), {"progress": asdict(training.progress)})

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
    groups = list(in_groups(held_out))
    logits = torch.cat([guesses(predictor, text, training.embeddings, group) for group in groups])
    measured = [where for group in groups for where in group]
    experts, seen = (text.known_experts(part) for part in (measured, learn))
    return TrainedPredictor(
        folder=folder,
        text_tokens=len(text.token_ids),
        held_out_tokens=len(experts),
        epochs=training.progress.epoch,
        loss=training.progress.best_loss,
        top_k=shape.top_k,
        hit_rates=hit_rates(logits, experts, shape.top_k, count_uses(seen, shape.num_experts, shape.top_k)),
    )
