"""The options of a training, defined once: default, help text and bounds. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from moeflow.core.errors import ConfigError

MAX_MINUTES = 100_000


def option(
    default: Any,
    help_text: str,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    choices: Sequence[str] = (),
) -> Any:
    """Return a field with its help text and bounds. A default of None leaves the choice to `minutes`."""
    bounds = {"at least": least, "above": above, "at most": most, "below": below}
    return field(default=default, metadata={"help": help_text, "bounds": bounds, "choices": choices})


def count(default: int | None, help_text: str, *, least: int = 1) -> Any:
    """Return a field of a number of things."""
    return option(default, help_text, least=least)


def minutes(default: float, phases: str) -> Any:
    """Return the field of the time budget of these phases."""
    return option(default, f"Time budget of {phases}.", above=0, most=MAX_MINUTES)


def learning_rate(default: float) -> Any:
    """Return the field of the highest learning rate."""
    return option(default, "Highest learning rate.", above=0, most=1)


@dataclass(frozen=True, slots=True)
class Recipe:
    """Options that decide a result. Raises: ConfigError when a value is out of its range."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value, bounds, choices = getattr(self, each.name), each.metadata["bounds"], each.metadata["choices"]
            if choices:
                require(each.name, value, f"one of {', '.join(choices)}", is_valid=value in choices)
            elif value is not None:
                rule = " and ".join(f"{word} {bound}" for word, bound in bounds.items() if bound is not None)
                require(each.name, value, rule, is_valid=_is_within(value, bounds))


def _is_within(value: float, bounds: dict[str, float | None]) -> bool:
    least, above, most, below = bounds.values()
    return (
        (least is None or value >= least)
        and (above is None or value > above)
        and (most is None or value <= most)
        and (below is None or value < below)
    )


def require(name: str, value: Any, rule: str, *, is_valid: bool) -> None:
    """Raises: ConfigError if the value is not valid."""
    if not is_valid:
        shown = f"{value:g}" if isinstance(value, float) else value
        raise ConfigError(f"{name.replace('_', '-')} is {shown}; it must be {rule}")
