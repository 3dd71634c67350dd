"""The options of a speculators' training."""

from __future__ import annotations

from dataclasses import dataclass

from moeflow.train.recipe import Recipe, count, minutes, option


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculatorRecipe(Recipe):
    """The options that decide the result, besides the target."""

    pool: int = count(1, "Number of draft models.")
    layers: int = count(6, "Layers of each: more predict better.")
    minutes: float = minutes(25.0, "text and training")
    text_tokens: int | None = count(None, "Number of text tokens, without a time limit.")
    steps: int | None = count(None, "Steps of each training, without a time limit.")
    temperature: float = option(0.8, "Temperature of the model's answers.", least=0, most=2)
    seed: int = option(0, "The same seed gives the same weights.")
