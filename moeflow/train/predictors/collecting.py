"""Collects the text to train a predictor on, with the routing of each token, round by round.

The text of an encoder is inputs; the text of its decoder is the model's answers to them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final, cast

from moeflow.engine.engine import Engine
from moeflow.engine.model_runner import ModelRunner
from moeflow.engine.text.tokenizer import Tokenizer
from moeflow.models.expert_predictor.network import PredictorShape
from moeflow.models.language_model import LanguageModel
from moeflow.models.layers.encoder_decoder import EncoderDecoderLM
from moeflow.planner.settings import Settings
from moeflow.train.phases import OnProgress
from moeflow.train.predictors.learning_text import AnsweredText, LearningText, MadeText, ModelsText, UsersText
from moeflow.train.predictors.recipe import TEXT_SHARE, PredictorRecipe
from moeflow.train.predictors.routed_text import RoutedText, routed, routed_answers
from moeflow.train.predictors.training import sequences_to_learn
from moeflow.train.speculators.teacher_text import running_target
from moeflow.train.text_rounds import TextRounds
from moeflow.train.work_folder import WorkFolder

NUM_KEPT: Final = 30  # logits of a token and layer, the paper's T
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
            source = _answer_rounds if is_behind_encoder else _text_rounds
            rounds.collect(source(rounds, engine, runner, recipe, min(NUM_KEPT, shape.num_experts), data))
    return RoutedText.joined(rounds.rounds)


NextRound = Callable[[int], RoutedText | None]


def _answer_rounds(
    rounds: TextRounds[RoutedText],
    engine: Engine,
    runner: ModelRunner,
    recipe: PredictorRecipe,
    num_kept: int,
    data: Path | None,
) -> NextRound:
    """Return the source of the model's answers to the user's inputs."""
    source = AnsweredText(_users_text(engine, recipe, data), engine, recipe.seed, rounds.on_tokens)
    model = cast(EncoderDecoderLM, runner.model)

    def next_round(number: int) -> RoutedText | None:
        pairs = source.round(number)
        return routed_answers(model, pairs, num_kept, lambda _: rounds.on_tokens(0)) if pairs else None

    return next_round


def _text_rounds(
    rounds: TextRounds[RoutedText],
    engine: Engine,
    runner: ModelRunner,
    recipe: PredictorRecipe,
    num_kept: int,
    data: Path | None,
) -> NextRound:
    """Return the source of the text of the user or the model, then of variants of it with replaced tokens."""
    own = data is None
    source: LearningText = (
        ModelsText(engine, recipe.seed, rounds.on_tokens) if own else _users_text(engine, recipe, data)
    )
    model = cast(LanguageModel, runner.model)
    made: MadeText | None = None  # once the source is exhausted

    def next_round(number: int) -> RoutedText | None:
        nonlocal made
        sequences = source.round(number) if made is None else []
        if not sequences and made is None and rounds.rounds:
            found = sequences_to_learn(RoutedText.joined(rounds.rounds))
            made = MadeText(found, engine.model.vocab_size, recipe.seed)
        if made is not None and not _has_made_enough(rounds, recipe):
            sequences = made.round(number)
        if not sequences:
            return None
        return routed(model, sequences, num_kept, lambda _: rounds.on_tokens(0), are_found=made is None)

    return next_round


def _has_made_enough(rounds: TextRounds[RoutedText], recipe: PredictorRecipe) -> bool:
    """Whether half of the text is variants, unless the recipe has a number of tokens."""
    num_found = sum(int(text.lengths[text.is_found].sum()) for text in rounds.rounds)
    return recipe.text_tokens is None and rounds.num_tokens >= 2 * num_found


def _users_text(engine: Engine, recipe: PredictorRecipe, data: Path | None) -> UsersText:
    assert data is not None, "an encoder has the user's text"
    tokenizer = Tokenizer.load(engine.config.model_path)
    encoder = engine.model.encoder
    longest = engine.model.max_model_len if encoder is None else encoder.max_input_tokens
    return UsersText(data, tokenizer, longest, recipe.seed)
