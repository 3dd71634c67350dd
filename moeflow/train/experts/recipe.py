"""The options of trained experts."""

from __future__ import annotations

from dataclasses import dataclass

from moeflow.train.recipe import Recipe, count, learning_rate, minutes, option


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRecipe(Recipe):
    """The options that decide the result, besides source and texts."""

    top_k: int = count(2, "Experts that each token uses.")
    rank: int = count(8, "Rank of each trained expert's change to a matrix (--train).")
    minutes: float = minutes(30.0, "--train")
    steps: int | None = count(None, "Steps of each expert's own training, without a time limit.")
    joint_steps: int | None = count(None, "Steps of the joint training, without a time limit.", least=0)
    learning_rate: float = learning_rate(2e-3)
    seed: int = option(0, "The same seed makes the same model.", least=0, below=2**63)
