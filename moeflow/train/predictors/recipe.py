"""The options of a predictor's training."""

from __future__ import annotations

from dataclasses import dataclass

from moeflow.train.recipe import Recipe, count, learning_rate, minutes, option


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictorRecipe(Recipe):
    """The options that decide the result, besides the model."""

    minutes: float = minutes(20.0, "text and training")
    text_tokens: int | None = count(None, "Number of text tokens, without a time limit.")
    epochs: int | None = count(None, "Most epochs, without a time limit.")
    learning_rate: float = learning_rate(3e-3)  # the paper trains longer, with 5e-5 and a batch of 64
    batch_size: int = count(32, "Pieces of text in a step.")
    hidden_size: int = count(256, "Hidden size of the network.")
    window: int = count(128, "Tokens of its attention.")
    seed: int = option(0, "The same seed gives the same weights.")
