"""Trains a predictor of a model's experts: collects text and its routing, trains, measures hit rates.

An encoder-decoder has two predictors, one for each stack with experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.checkpoint.identity import content_fingerprint
from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.errors import ConfigError
from moeflow.models.expert_predictor.embeddings import read_embeddings
from moeflow.models.expert_predictor.network import ExpertPredictor, PredictorShape
from moeflow.models.expert_predictor.saved import decoder_folder, is_saved, predictor_folder, save_predictor
from moeflow.models.registry import read_model_config
from moeflow.settings.settings import Settings
from moeflow.train.examples import used_rows
from moeflow.train.loop import TrainingLoop
from moeflow.train.phases import OnProgress, Phase, ignore
from moeflow.train.predictors.collecting import TEXT_SHARE, TRAINING, collected_text
from moeflow.train.predictors.hit_rates import HitRates, count_uses, hit_rates
from moeflow.train.predictors.recipe import PredictorRecipe
from moeflow.train.predictors.routed_text import RoutedText
from moeflow.train.predictors.training import Embeddings, PredictorTask, in_groups, predict, split
from moeflow.train.schedule import Progress, limited
from moeflow.train.text_file import read_text
from moeflow.train.work_folder import digest_of, work_folder


@dataclass(frozen=True, slots=True)
class TrainedPredictor:
    """A trained predictor and its hit rates on held-out text."""

    folder: Path
    text_tokens: int
    held_out_tokens: int
    epochs: int
    loss: float  # of the best epoch on held-out text, in nats
    top_k: int
    hit_rates: HitRates
    decoder: TrainedPredictor | None = None  # the second predictor of an encoder-decoder

    def in_figures(self) -> dict[str, Any]:
        """Return all but the folder, for JSON."""
        figures = {name: getattr(self, name) for name in self.__slots__ if name not in ("folder", "decoder")}
        figures |= {"hit_rates": asdict(self.hit_rates), "mean_hit_rates": self.hit_rates.mean()}
        return figures | ({} if self.decoder is None else {"decoder": self.decoder.in_figures()})


@dataclass(frozen=True, slots=True)
class _Part:
    """A stack of layers with experts, and the place of its predictor."""

    shape: PredictorShape
    folder: Path
    is_behind_encoder: bool = False  # the decoder of an encoder-decoder

    @property
    def work(self) -> Path:
        """The folder of unfinished work."""
        return self.folder / ".training"

    @property
    def is_begun(self) -> bool:
        """Whether there is unfinished work."""
        return (self.work / "recipe.json").exists()


def train_predictor(
    settings: Settings,
    recipe: PredictorRecipe,
    *,
    out: Path | None = None,
    data: Path | None = None,
    overwrite: bool = False,
    restart: bool = False,
    on_progress: OnProgress = ignore,
) -> TrainedPredictor:
    """Train a predictor for `settings.model` and save it; resume unfinished work.

    Raises: CheckpointError, ConfigError, CapacityError; EngineError if the model fails.
    """
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
        trained = [_train_part(checkpoint, part, settings, each, model, data, on_progress) for part in todo]
    return replace(trained[0], decoder=trained[1]) if len(trained) > 1 else trained[0]


def _to_do(parts: Sequence[_Part], *, overwrite: bool) -> Sequence[_Part]:
    """Return all parts, or those from the unfinished one on. Raises: ConfigError if there is a predictor already."""
    begun = [number for number, part in enumerate(parts) if part.is_begun]
    if begun:
        return parts[begun[-1] :]
    if not overwrite and (there := [part.folder for part in parts if is_saved(part.folder)]):
        raise ConfigError(f"{there[0]} exists already. Replace it (--overwrite), or choose another folder (--out)")
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
        inputs = {
            "weights of the model": content_fingerprint(checkpoint),
            "content of the texts": None if data is None else digest_of(read_text(data)),
        }
        work.check_recipe({"model": str(model), "data": str(data), **inputs, **asdict(recipe)})
        text = collected_text(
            settings, recipe, part.shape, data, work, report, is_behind_encoder=part.is_behind_encoder
        )
        task = _task(checkpoint, part.shape, text, recipe)
        schedule = limited(recipe.epochs, recipe.minutes * 60 * (1 - TEXT_SHARE))
        loop = TrainingLoop(task, schedule, work.file(TRAINING))
        loop.run(lambda progress: report(Phase.TRAINING, *schedule.count(progress)))
        trained = _measured(task, loop.progress, text, part.folder)
        save_predictor(task.predictor, checkpoint, part.folder, trained.in_figures())
        work.clear()
    return trained


def _parts(checkpoint: Checkpoint, recipe: PredictorRecipe, data: Path | None, folder: Path) -> Iterator[_Part]:
    """Yield the stacks with experts. Raises: ConfigError if there is none, or an encoder has no text."""
    config = read_model_config(checkpoint)
    if not config.num_moe_layers:
        raise ConfigError(f"{checkpoint.path} has no experts: there is nothing to predict")
    if config.encoder is not None and data is None:
        raise ConfigError(
            f"{checkpoint.path} has an encoder, which generates no text to learn from: add inputs (--data)"
        )
    shape = PredictorShape(
        embedding_size=config.hidden_size,
        num_layers=config.num_moe_layers - config.num_encoder_moe_layers,
        num_experts=config.routing.num_experts,
        top_k=config.routing.top_k,
        hidden_size=recipe.hidden_size,
        window=recipe.window,
        has_direct=recipe.heads == "direct",
    )
    if config.num_encoder_moe_layers:
        yield _Part(replace(shape, num_layers=config.num_encoder_moe_layers, is_causal=False), folder)
    if shape.num_layers:
        has_encoder = config.encoder is not None
        yield _Part(shape, decoder_folder(folder) if has_encoder else folder, is_behind_encoder=has_encoder)


def _task(checkpoint: Checkpoint, shape: PredictorShape, text: RoutedText, recipe: PredictorRecipe) -> PredictorTask:
    torch.manual_seed(recipe.seed)
    rows = read_embeddings(checkpoint)
    used, places = used_rows(text.token_ids, len(rows))
    return PredictorTask(ExpertPredictor(shape), text, Embeddings(rows[used], places), recipe)


@torch.inference_mode()
def _measured(task: PredictorTask, progress: Progress, text: RoutedText, folder: Path) -> TrainedPredictor:
    predictor = task.predictor.eval()
    shape = predictor.shape
    learn, held_out = split(text)
    groups = list(in_groups(held_out))
    logits = torch.cat([predict(predictor, text, task.embeddings, group) for group in groups])
    measured = [where for group in groups for where in group]
    experts, seen = (text.known_experts(part) for part in (measured, learn))
    return TrainedPredictor(
        folder=folder,
        text_tokens=len(text.token_ids),
        held_out_tokens=len(experts),
        epochs=progress.begun_epochs,
        loss=progress.best_loss,
        top_k=shape.top_k,
        hit_rates=hit_rates(logits, experts, shape.top_k, count_uses(seen, shape.num_experts, shape.top_k)),
    )
