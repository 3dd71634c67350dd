"""Collects the text to train a predictor on, with the routing of each token, round by round.

The text of an encoder is inputs; the text of its decoder is the model's answers to them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, cast

from moeflow.engine.engine import Engine
from moeflow.models.expert_predictor.network import PredictorShape
from moeflow.models.language_model import LanguageModel
from moeflow.models.layers.encoder_decoder import EncoderDecoderLM
from moeflow.settings.settings import Settings
from moeflow.train.phases import OnProgress
from moeflow.train.predictors.learning_text import Source, decoder_answers, models_text, users_text, variants
from moeflow.train.predictors.recipe import PredictorRecipe
from moeflow.train.predictors.routed_text import RoutedText, routed, routed_answers
from moeflow.train.predictors.training import sequences_to_learn
from moeflow.train.speculators.teacher_text import running_target
from moeflow.train.text_rounds import TextRounds
from moeflow.train.work_folder import WorkFolder

NUM_KEPT: Final = 30  # logits of a token and layer, the paper's T
TEXT_SHARE: Final = 0.5  # of the time, for text and its routing
TRAINING: Final = "training"  # the state of the training; with it the text is complete


def collected_text(
    settings: Settings,
    recipe: PredictorRecipe,
    shape: PredictorShape,
    data: Path | None,
    work: WorkFolder,
    report: OnProgress,
    *,
    is_behind_encoder: bool,
) -> RoutedText:
    """Return the text; run the model for the missing rounds. Raises: ConfigError if there is none."""
    seconds = recipe.minutes * 60 * TEXT_SHARE
    rounds = TextRounds(RoutedText, work, report, text_tokens=recipe.text_tokens, seconds=seconds)
    if not (work.file(TRAINING).path.exists() or rounds.is_enough):
        with running_target(settings, report) as (engine, runner):
            seed, on_tokens = recipe.seed, rounds.on_tokens
            source = models_text(engine, seed, on_tokens) if data is None else users_text(data, engine, seed)
            model, num_kept = cast(LanguageModel, runner.model), min(NUM_KEPT, shape.num_experts)
            routing = _Routing(rounds, engine, model, source, recipe, num_kept)
            rounds.collect(routing.of_answers if is_behind_encoder else routing.of_text)
    return RoutedText.joined(rounds.rounds)


class _Routing:
    """Runs the rounds of a source through the model."""

    def __init__(
        self,
        rounds: TextRounds[RoutedText],
        engine: Engine,
        model: LanguageModel,
        source: Source,
        recipe: PredictorRecipe,
        num_kept: int,
    ) -> None:
        self._rounds, self._engine, self._model, self._source = rounds, engine, model, source
        self._recipe, self._num_kept = recipe, num_kept
        self._are_found = True  # until the source is exhausted

    def of_answers(self, number: int) -> RoutedText | None:
        """Return a round of the decoder's answers."""
        seed = self._recipe.seed * 1_000_003 + number
        pairs = decoder_answers(self._engine, self._source(number), seed, self._rounds.on_tokens)
        return routed_answers(cast(EncoderDecoderLM, self._model), pairs, self._num_kept, self._tick) if pairs else None

    def of_text(self, number: int) -> RoutedText | None:
        """Return a round of the source, then of variants until these are half of the text."""
        sequences = self._source(number)
        if not sequences and self._are_found and self._rounds.rounds:
            found = sequences_to_learn(RoutedText.joined(self._rounds.rounds))
            self._source = variants(found, self._engine.model.vocab_size, self._recipe.seed)
            self._are_found, sequences = False, self._source(number)
        if not sequences or (not self._are_found and self._is_half_variants):
            return None
        return routed(self._model, sequences, self._num_kept, self._tick, are_found=self._are_found)

    @property
    def _is_half_variants(self) -> bool:
        """Whether half of the text is variants, unless the recipe has a number of tokens."""
        num_found = sum(int(text.lengths[text.is_found].sum()) for text in self._rounds.rounds)
        return self._recipe.text_tokens is None and self._rounds.num_tokens >= 2 * num_found

    def _tick(self, _: int) -> None:
        self._rounds.on_tokens(0)
