"""Whether the table that embeds tokens for each layer takes memory: it may be most of a small model's bytes."""

from __future__ import annotations

from pathlib import Path

from moeflow.core.units import format_bytes
from moeflow.planner.choices.processor_choice import Reasons
from moeflow.planner.costs.model_costs import ModelCosts


def stays_on_disk(costs: ModelCosts, packed_file: Path | None, reasons: Reasons) -> bool:
    """Return whether tokens read their rows from mapped packed weights on disk. Also report the table's place.

    `packed_file` is None where weights are packed at the start.
    """
    sizes = costs.shape.embeddings.layer_embeddings
    if sizes is None:
        return False
    size, row = format_bytes(costs.layer_table_bytes), format_bytes(costs.layer_table_bytes / sizes.vocab_size)
    if packed_file is None:
        reasons.append(("layer embeddings", f"{size} in memory; of packed weights (`moeflow pack`) they stay on disk"))
        return False
    reasons.append(("layer embeddings", f"{size} stay on disk, in the packed weights: a token needs {row} of them"))
    return True
