"""The place of a model's trained speculators: next to the model, numbered in the order of training."""

from __future__ import annotations

from pathlib import Path


def speculators_folder(model: Path) -> Path:
    """Return the folder for the speculators of a model: in its folder, or beside its file."""
    return model.with_name(f"{model.name}.speculators") if model.is_file() else model / "speculators"


def trained_speculators(model: Path) -> list[Path]:
    """Return the folders of a model's completely trained speculators, the first one first."""
    folder = speculators_folder(model)
    if not folder.is_dir():
        return []
    found = [each for each in folder.iterdir() if each.name.isdecimal() and (each / "config.json").is_file()]
    return sorted(found, key=lambda each: int(each.name))
