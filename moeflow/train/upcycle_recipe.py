"""What a model is upcycled by: enough to tell one result from another. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from moeflow.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class UpcycleRecipe:
    """What decides the result, beside the source and the calibration text.

    Raises: ConfigError when a value is out of its range.
    """

    num_experts: int = 8
    top_k: int = 2  # experts per token
    perturbation: float = 0.02  # standard deviation of the noise, as a share of that of the matrix
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_experts < 1:
            raise ConfigError(f"experts is {self.num_experts}; there must be at least 1")
        if not 1 <= self.top_k <= self.num_experts:
            raise ConfigError(
                f"top-k is {self.top_k}; it must lie from 1 to the number of experts ({self.num_experts})"
            )
        if not 0.0 <= self.perturbation <= 1.0:
            raise ConfigError(f"perturbation is {self.perturbation}; it must lie from 0 to 1 (0.02 is a good value)")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed is {self.seed}; it must lie from 0 to 2^63 - 1")
