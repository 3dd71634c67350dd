"""Checks of a recipe's values. The messages name the command's options."""

from __future__ import annotations

from typing import Any

from moeflow.core.errors import ConfigError

MAX_MINUTES = 100_000


def require(name: str, value: Any, rule: str, *, is_valid: bool) -> None:
    """Raises: ConfigError if the value is not valid."""
    if not is_valid:
        shown = f"{value:g}" if isinstance(value, float) else value
        raise ConfigError(f"{name.replace('_', '-')} is {shown}; it must be {rule}")


def check_recipe(recipe: Any, *counts: str) -> None:
    """Check the named counts, the minutes, and the learning rate if there is one.

    Raises: ConfigError if a value is out of its range.
    """
    for name in counts:
        value = getattr(recipe, name)
        require(name, value, "at least 1", is_valid=value is None or value >= 1)
    require(
        "minutes", recipe.minutes, f"above 0 and at most {MAX_MINUTES:,}", is_valid=0 < recipe.minutes <= MAX_MINUTES
    )
    rate = getattr(recipe, "learning_rate", 1.0)
    require("learning_rate", rate, "above 0 and at most 1", is_valid=0 < rate <= 1)
