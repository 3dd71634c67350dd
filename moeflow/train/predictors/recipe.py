"""How a predictor is to be trained, and what is told of it meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from moeflow.core.errors import ConfigError
from moeflow.train.predictors.training import Limits

TEXT_SHARE: Final = 0.5  # of the time, for text and what routers say of it


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
    learning_rate: float = 3e-3  # the paper has 5e-5 and 64, and trains for longer
    batch_size: int = 32  # pieces of text
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
