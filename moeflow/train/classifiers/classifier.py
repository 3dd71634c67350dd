"""Trains a classifier with experts: reads labelled texts, initializes, trains, measures, saves."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from moeflow.checkpoint.identity import fingerprint_of
from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.errors import CheckpointError, ConfigError
from moeflow.text.tokenizer import Tokenizer
from moeflow.train.classifiers.enlarging import check_enlarging, enlarge
from moeflow.train.classifiers.expert_use import ExpertUse, expert_use
from moeflow.train.classifiers.labelled_text import LabelledText, labelled_text, read_lines, sorted_labels
from moeflow.train.classifiers.network import ClassifierShape, SwitchClassifier
from moeflow.train.classifiers.recipe import ClassifierRecipe
from moeflow.train.classifiers.saved import load_classifier, save_classifier
from moeflow.train.classifiers.training import ClassifierTask, accuracy
from moeflow.train.examples import used_rows
from moeflow.train.loop import TrainingLoop
from moeflow.train.phases import OnProgress, Phase, ignore
from moeflow.train.schedule import Progress, limited
from moeflow.train.text_file import read_text
from moeflow.train.work_folder import digest_of, work_folder

_TRAINING: Final = "training"
_EMBEDDINGS: Final = "model.embed_tokens.weight"
_TABLE: Final = "embed.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifierTexts:
    """Files with lines of `text<TAB>label`."""

    data: Path  # a tenth is held out
    dev: Path | None = None
    test: Path | None = None
    labels: tuple[str, ...] = ()  # names of the classes, in the order of the sorted labels; none: the labels

    def files(self) -> dict[str, Path]:
        """Return the given files by name."""
        return {name: file for name in ("data", "dev", "test") if (file := getattr(self, name)) is not None}


@dataclass(frozen=True, slots=True)
class TrainedClassifier:
    """A trained classifier and its quality."""

    folder: Path
    shape: ClassifierShape
    labels: list[str]
    epochs: int
    loss: float  # of the best epoch on held-out texts, in nats
    accuracies: dict[str, float]  # by set of texts: held_out, dev, test
    use: ExpertUse  # on held-out texts
    training_s: float  # of all starts

    def in_figures(self) -> dict[str, Any]:
        """Return all but the folder, for JSON."""
        return {name: value for name, value in asdict(self).items() if name != "folder"}


def train_classifier(
    texts: ClassifierTexts,
    recipe: ClassifierRecipe,
    out: Path,
    *,
    tokens_from: Path | None = None,
    upcycle_from: Path | None = None,
    overwrite: bool = False,
    restart: bool = False,
    on_progress: OnProgress = ignore,
) -> TrainedClassifier:
    """Train a classifier and save it in folder `out`; resume unfinished work.

    It starts with the tokenizer and embeddings of the model `tokens_from`, or with the classifier `upcycle_from`, which
    gets more experts. One of the two must be given. Raises: CheckpointError, ConfigError, CapacityError.
    """
    folder = out.absolute()
    if not overwrite and folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ConfigError(f"{folder} exists already. Replace it (--overwrite), or choose another folder (--out)")
    source = upcycle_from or tokens_from
    if source is None:
        raise ConfigError("no model is given for the tokenizer and embeddings. Name one (--tokens-from)")
    with work_folder(folder.with_name(f".{folder.name}.training")) as work:
        state = work.file(_TRAINING)
        if restart or not state.path.exists():
            work.clear()
        files = {name: str(file.absolute()) for name, file in texts.files().items()}
        inputs = {
            "weights of the source": fingerprint_of(str(source)),
            "content of the texts": {name: digest_of(read_text(file)) for name, file in texts.files().items()},
        }
        options = {"source": str(source.absolute()), "labels": texts.labels, **files, **asdict(recipe)}
        work.check_recipe(options | inputs)
        making = _Making(texts, recipe, source, on_progress)
        task = making.task(is_enlarged=upcycle_from is not None, is_resumed=state.path.exists())
        schedule = limited(recipe.epochs, recipe.minutes * 60)
        loop = TrainingLoop(task, schedule, state)
        loop.run(lambda progress: on_progress(Phase.TRAINING, *schedule.count(progress)))
        trained = making.measured(task, loop.progress, folder)
        making.save(task.network.eval(), folder, overwrite=overwrite)
        work.clear()
    return trained


class _Making:
    """The texts, tokens and labels of a classifier."""

    def __init__(self, texts: ClassifierTexts, recipe: ClassifierRecipe, source: Path, report: OnProgress) -> None:
        self._recipe, self._source, self._report = recipe, source, report
        self._tokenizer = Tokenizer.load(source)
        lines = {name: read_lines(file) for name, file in texts.files().items()}
        found = sorted_labels(lines["data"])
        self._labels = _names(found, texts)
        self._sets: dict[str, LabelledText] = {}
        for name, file in texts.files().items():
            report(Phase.TOKENS, len(self._sets), len(lines))
            self._sets[name] = labelled_text(file, lines[name], found, self._tokenizer.encode)
        report(Phase.TOKENS, len(lines), len(lines))

    def task(self, *, is_enlarged: bool, is_resumed: bool) -> ClassifierTask:
        """Return the training at its start; a resumed one gets its weights from its state."""
        torch.manual_seed(self._recipe.seed)
        network = self._enlarged(fits=not is_resumed) if is_enlarged else self._fresh()
        return ClassifierTask(network, self._sets["data"], self._recipe)

    def measured(self, task: ClassifierTask, progress: Progress, folder: Path) -> TrainedClassifier:
        """Return the quality of the trained classifier."""
        network = task.network
        sets = {"held_out": task.held_out} | {name: self._sets[name] for name in self._sets if name != "data"}
        accuracies: dict[str, float] = {}
        for name, text in sets.items():
            self._report(Phase.MEASURING, len(accuracies), len(sets))
            accuracies[name] = accuracy(network, text)
        use = expert_use(network, task.held_out)
        self._report(Phase.MEASURING, len(sets), len(sets))
        return TrainedClassifier(
            folder=folder,
            shape=network.shape,
            labels=self._labels,
            epochs=progress.begun_epochs,
            loss=progress.best_loss,
            accuracies=accuracies,
            use=use,
            training_s=progress.spent_s,
        )

    def save(self, network: SwitchClassifier, folder: Path, *, overwrite: bool) -> None:
        """Write the checkpoint, with the trained embeddings."""
        self._table[self._rows] = network.embed.weight.detach()
        save_classifier(
            network,
            self._table,
            self._labels,
            self._tokenizer,
            folder,
            dtype=getattr(torch, self._recipe.dtype),
            overwrite=overwrite,
            on_bytes=lambda done, total: self._report(Phase.WRITING, done, total),
        )

    def _fresh(self) -> SwitchClassifier:
        recipe = self._recipe
        with closing(open_checkpoint(self._source)) as checkpoint:
            if _EMBEDDINGS not in checkpoint.tensors:
                raise CheckpointError(
                    f"has no {_EMBEDDINGS}",
                    file=checkpoint.path,
                    remedy="Use the tokens of a decoder-only model (--tokens-from)",
                )
            table = checkpoint.read(_EMBEDDINGS).float()
        shape = ClassifierShape(
            hidden_size=table.shape[1],
            num_layers=recipe.layers,
            num_sparse_layers=recipe.sparse_layers,
            num_experts=recipe.experts,
            num_heads=recipe.heads,
            head_dim=recipe.head_dim,
            ffn_size=recipe.ffn_size,
            num_classes=len(self._labels),
        )
        return SwitchClassifier(shape, self._own_rows(table / table.std()), recipe.dropout)  # T5's start with 1

    def _enlarged(self, *, fits: bool) -> SwitchClassifier:
        """Return a larger classifier, with weights if `fits`."""
        shape, weights, table, labels = load_classifier(self._source)
        if labels != self._labels:
            raise ConfigError(f"the labels are {self._labels}, but {self._source} has {labels}. Give --labels")
        check_enlarging(shape.num_experts, self._recipe.experts)
        rows = self._own_rows(table)
        large = SwitchClassifier(replace(shape, num_experts=self._recipe.experts), rows, self._recipe.dropout)
        if fits:
            self._report(Phase.ENLARGING, 0, 1)
            small = SwitchClassifier(shape, rows, self._recipe.dropout)
            _load(small, weights | {_TABLE: rows}, self._source)
            enlarge(small, large, self._sets["data"], self._recipe.seed)
            self._report(Phase.ENLARGING, 1, 1)
        return large

    def _own_rows(self, table: Tensor) -> Tensor:
        """Return the embeddings of the tokens that occur, and renumber the tokens of all texts accordingly."""
        token_ids = torch.cat([ids for text in self._sets.values() for ids in text.token_ids])
        if int(token_ids.max()) >= len(table):
            raise CheckpointError(
                f"the tokenizer has more tokens than the table of {len(table)} embeddings",
                file=self._source,
                remedy="Download the model again",
            )
        self._table, (self._rows, places) = table, used_rows(token_ids, len(table))
        for text in self._sets.values():
            text.token_ids[:] = [places[ids] for ids in text.token_ids]
        return table[self._rows]


def _names(found: Sequence[str], texts: ClassifierTexts) -> list[str]:
    if len(found) < 2:
        raise ConfigError(f"{texts.data} has only the label {found[0]!r}; at least two are needed")
    names = list(texts.labels or found)
    if len(set(names)) != len(found):
        raise ConfigError(f"labels names {', '.join(names)}; {texts.data} has {len(found)}: {', '.join(found)}")
    return names


def _load(network: SwitchClassifier, weights: dict[str, Tensor], source: Path) -> None:
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:
        raise CheckpointError(
            f"its weights do not match its config ({error})", file=source, remedy="Train it again"
        ) from error
