"""The name that a model is served by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_MARKS: Final = {"lossy_routing": "lossy", "capacity_factor": "capacity"}  # of settings that change answers


def served_name(name: str, settings: Mapping[str, Any]) -> str:
    """Return a model's name with a mark for each given setting that changes its answers."""
    given = {mark: settings.get(field) for field, mark in _MARKS.items()}
    return name + "".join(f":{mark}-{value}" for mark, value in given.items() if value is not None)
