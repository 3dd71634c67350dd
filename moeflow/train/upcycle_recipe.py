"""The options of upcycling. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from moeflow.train.recipe import require


@dataclass(frozen=True, slots=True, kw_only=True)
class UpcycleRecipe:
    """The options that decide the result, besides source and calibration text.

    Raises: ConfigError when a value is out of its range.
    """

    num_experts: int = 8
    top_k: int = 2  # experts per token
    perturbation: float = 0.02  # standard deviation of the noise, as a share of that of the matrix
    seed: int = 0

    def __post_init__(self) -> None:
        most = f"from 1 to the number of experts ({self.num_experts})"
        require("experts", self.num_experts, "at least 1", is_valid=self.num_experts >= 1)
        require("top_k", self.top_k, most, is_valid=1 <= self.top_k <= self.num_experts)
        share = self.perturbation
        require("perturbation", share, "from 0 to 1 (0.02 is a good value)", is_valid=0.0 <= share <= 1.0)
        require("seed", self.seed, "from 0 to 2^63 - 1", is_valid=0 <= self.seed < 2**63)
