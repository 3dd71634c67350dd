"""What a start finds of earlier ones: packed weights to map, and how much which inputs of matrices matter."""

from __future__ import annotations

from pathlib import Path

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.checkpoint.packed.layout import SlabSpec
from moeflow.planner.choices.packed_files import find_packed_weights_file
from moeflow.planner.choices.processor_choice import Reasons
from moeflow.planner.choices.weight_choice import WeightChoice
from moeflow.planner.known_importance import known_importance_file
from moeflow.settings.settings import Settings


def found_packed_file(settings: Settings, checkpoint: Checkpoint, spec: SlabSpec) -> Path | None:
    """Return the packed weights that are there. See `find_packed_weights_file`, also for its exceptions."""
    return find_packed_weights_file(checkpoint, spec, settings.packed_weights_file, settings.cache_dir)


def choose_packed_file(
    settings: Settings, checkpoint: Checkpoint, spec: SlabSpec, file: Path | None, reasons: Reasons
) -> str:
    """Return the packed weights that all weights are mapped from, which are those found in `file`; empty if none."""
    named = settings.packed_weights_file
    if file is not None:
        reasons.append(("start", f"weights are mapped from {file}, as `moeflow pack` left them"))
    elif named is not None:
        reasons.append(("start", f"weights are packed anew: {named} is not there (`moeflow pack` makes it)"))
    return "" if file is None else str(file)


def choose_importance_file(settings: Settings, checkpoint: Checkpoint, weights: WeightChoice, reasons: Reasons) -> str:
    """Return the known importance of inputs, for rounding to a mix; empty if unknown.

    Ranks on other machines may know something else, and all are to round alike.
    """
    if weights.mix is None or settings.is_spread:
        return ""
    file = known_importance_file(checkpoint, settings.cache_dir)
    known = "known from text" if file else "not known: `moeflow pack` learns it"
    reasons.append(("quantize", f"{weights.mix}: which inputs matter is {known}"))
    return "" if file is None else str(file)
