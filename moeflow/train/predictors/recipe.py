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
    learning_rate: float = learning_rate(3e-3)  # published: 5e-5, with a batch of 64, constant
    schedule: str = option(
        "cosine",
        "Learning rate: cosine, over the time or epochs after a short rise; or constant, until held-out text stops "
        "improving.",
        choices=("cosine", "constant"),
    )
    loss: str = option(
        "truncated",
        "Experts among which the network's probabilities are compared with the routers': truncated, the routers' 30 "
        "likeliest alone, as published; or all.",
        choices=("truncated", "all"),
    )
    batch_size: int = count(32, "Pieces of text in a step.")
    hidden_size: int = count(256, "Hidden size of the network.")
    heads: str = option(
        "direct",
        "Inputs of the network's heads: direct, with the token's own embedding; or published, without.",
        choices=("direct", "published"),
    )
    window: int = count(128, "Tokens of its attention.")
    seed: int = option(0, "The same seed gives the same weights.")
