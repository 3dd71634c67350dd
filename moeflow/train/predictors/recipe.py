"""The options of a predictor's training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from moeflow.train.loop import Schedule
from moeflow.train.recipe_checks import check_recipe

TEXT_SHARE: Final = 0.5  # of the time, for text and its routing


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictorRecipe:
    """The options that decide the result, besides the model. Raises: ConfigError when a value is out of its range."""

    minutes: float = 20.0  # for everything
    text_tokens: int | None = None  # None: `minutes` decide
    epochs: int | None = None  # at most; None: `minutes` decide
    learning_rate: float = 3e-3  # the paper trains longer, with 5e-5 and a batch of 64
    batch_size: int = 32  # pieces of text
    hidden_size: int = 256
    window: int = 128  # tokens of attention
    seed: int = 0

    def __post_init__(self) -> None:
        check_recipe(self, "text_tokens", "epochs", "batch_size", "hidden_size", "window")

    @property
    def schedule(self) -> Schedule:
        """The limit of the training: epochs if given, else a share of the time."""
        if self.epochs is not None:
            return Schedule(epochs=self.epochs)
        return Schedule(seconds=self.minutes * 60 * (1 - TEXT_SHARE))
