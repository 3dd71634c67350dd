"""Collects the text that a predictor learns from, with what the model's routers say of it, round by round.

For an encoder that is inputs; for a decoder behind one, what the model answers to these.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final, cast

from moeflow.core.errors import ConfigError
from moeflow.engine.engine import Engine
from moeflow.engine.model_runner import ModelRunner
from moeflow.engine.runner_loading import load_runner
from moeflow.engine.text.tokenizer import Tokenizer
from moeflow.models.expert_predictor.network import PredictorShape
from moeflow.models.language_model import LanguageModel
from moeflow.models.layers.encoder_decoder import EncoderDecoderLM
from moeflow.planner.planning import plan_for_start
from moeflow.planner.settings import Settings
from moeflow.planner.usage import OFFLINE
from moeflow.train.predictors.learning_text import AnsweredText, LearningText, MadeText, ModelsText, UsersText
from moeflow.train.predictors.recipe import TEXT_SHARE, OnProgress, Phase, PredictorRecipe
from moeflow.train.predictors.routed_text import RoutedText, joined, routed, routed_answers
from moeflow.train.predictors.training import sequences_to_learn
from moeflow.train.work_folder import WorkFolder

NUM_KEPT: Final = 30  # logits of a token and layer, the paper's T
TRAINING: Final = "training"  # what is kept of it: then the text is complete


class Collecting:
    """Text with what routers say of it: what there is, and what is missing."""

    def __init__(
        self,
        settings: Settings,
        recipe: PredictorRecipe,
        shape: PredictorShape,
        data: Path | None,
        work: WorkFolder,
        report: OnProgress,
        *,
        is_behind_encoder: bool,
    ) -> None:
        self._settings, self._recipe, self._shape = settings, recipe, shape
        self._data, self._work, self._report = data, work, report
        self._is_behind_encoder = is_behind_encoder
        self._found: list[RoutedText] = []
        while (kept := work.load(_text_name(len(self._found)))) is not None:
            self._found.append(RoutedText(**kept[0]))
        self._began_s = time.monotonic()

    def text(self) -> RoutedText:
        """Return all of it. Blocks: until it is there."""
        if self._work.load(TRAINING) is None and not (self._found and self._suffices):
            with _running(self._settings, self._report) as (engine, runner):
                self._began_s = time.monotonic()
                self._collect(engine, runner)
            self._report(Phase.TEXT, self._num_tokens, self._num_tokens)
        if not self._found:
            raise ConfigError("there is no text to learn from: give more (--data)")
        return joined(self._found)

    def _collect(self, engine: Engine, runner: ModelRunner) -> None:
        if self._is_behind_encoder:
            self._collect_answers(engine, runner)
        else:
            self._collect_text(engine, runner)

    def _collect_answers(self, engine: Engine, runner: ModelRunner) -> None:
        """Collect what the model answers to the user's inputs."""
        source = AnsweredText(self._users_text(engine), engine, self._recipe.seed, self._on_tokens)
        model, num_kept = cast(EncoderDecoderLM, runner.model), min(NUM_KEPT, self._shape.num_experts)
        while not self._found or not self._suffices:
            pairs = source.round(len(self._found))
            if not pairs:
                return
            self._keep(routed_answers(model, pairs, num_kept, self._on_tokens))

    def _keep(self, text: RoutedText) -> None:
        self._work.save(_text_name(len(self._found)), text.tensors())
        self._found.append(text)

    def _collect_text(self, engine: Engine, runner: ModelRunner) -> None:
        source = self._source(engine)
        num_kept = min(NUM_KEPT, self._shape.num_experts)
        made: MadeText | None = None  # when there is no more text to be found
        while not self._found or not self._suffices:
            number = len(self._found)
            sequences = source.round(number) if made is None else made.round(number)
            if not sequences and made is None and self._found:
                made = MadeText(sequences_to_learn(joined(self._found)), engine.model.vocab_size, self._recipe.seed)
                sequences = made.round(number)
            if not sequences or (made is not None and self._has_made_enough):
                return
            model, are_found = cast(LanguageModel, runner.model), made is None
            self._keep(routed(model, sequences, num_kept, self._on_tokens, are_found=are_found))

    def _source(self, engine: Engine) -> LearningText:
        if self._data is None:
            return ModelsText(engine, Tokenizer.load(engine.config.model_path), self._recipe.seed, self._on_tokens)
        return self._users_text(engine)

    def _users_text(self, engine: Engine) -> UsersText:
        assert self._data is not None, "there is text of the user's, or the model makes it up"
        tokenizer = Tokenizer.load(engine.config.model_path)
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
    def _has_made_enough(self) -> bool:
        """Whether as much text was made as was found, if nobody says how much there is to be."""
        num_found = sum(int(text.lengths[text.is_found].sum()) for text in self._found)
        return self._recipe.text_tokens is None and self._num_tokens >= 2 * num_found

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


def _text_name(number: int) -> str:
    return f"text-{number:05d}"
