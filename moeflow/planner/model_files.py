"""Shapes of models by name: bare `config.json` files that moeflow ships, to plan and simulate with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

_SHIPPED = Path(__file__).parent / "models"
_SUFFIX: Final = ".json"


def shipped_models() -> Mapping[str, Path]:
    """Return the file of each shipped shape by its name."""
    found = {file.name.removesuffix(_SUFFIX): file for file in _SHIPPED.iterdir()}
    return {name: file for name, file in sorted(found.items()) if file.suffix == _SUFFIX}


def bare_config(model: str) -> Path | None:
    """Return the file that has a model's shape without weights; None if the model is a checkpoint."""
    return shipped_models().get(model) or (Path(model) if model.endswith(_SUFFIX) else None)
