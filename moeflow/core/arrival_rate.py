"""How often requests may be said to come."""

from __future__ import annotations

from typing import Final

from moeflow.core.errors import ConfigError

MIN_RATE: Final = 1e-5  # requests a second: about one a day
MAX_RATE: Final = 1e6


def check_rate(rate: float, *, also: str = "") -> None:
    """Refuse invalid rates, and rates too extreme to compute with; `also` is what else may be said.

    Raises: ConfigError.
    """
    if not MIN_RATE <= rate <= MAX_RATE:  # false for nan, too
        raise ConfigError(
            f"{rate:g} requests a second make no traffic to measure: say a rate from {MIN_RATE:g} (about one a "
            f"day) to {MAX_RATE:,.0f}{also}"
        )
