"""From what ranks measured in a case to the figures of the study: critical path, idle time, speed-up.

The critical path is the sum over sections of the slowest rank's time: what the layer takes where each rank has a core
of its own and sections end at barriers. Ranks idle for the difference between it and their own work.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from moeflow.parallel.placement.layouts import CAPACITY_DROPLESS
from studies.parallel.layer_cost import LayerCost
from studies.parallel.meter import SECTIONS
from studies.parallel.rank import RankRun

BASELINE: Final = CAPACITY_DROPLESS

Times = NDArray[np.floating]


def to_fields(runs: list[list[RankRun]], num_choices: int, predicted: LayerCost | None) -> dict[str, Any]:
    """Return a layout's part of a record: of each repeat and rank what it took, of each rank what it sent."""
    checked = [run for each in runs for run in each if run.error is not None]
    fields: dict[str, Any] = {
        "seconds": [[[run.seconds[name] for name in SECTIONS] for run in each] for each in runs],
        "wall_s": [max(run.wall_s for run in each) for each in runs],
        "sent_bytes": [run.sent_bytes for run in runs[-1]],
        "dropped_share": sum(run.num_dropped for run in runs[-1]) / num_choices,
        "is_equal": all(run.is_equal for run in checked),
        "error": max(run.error or 0.0 for run in checked),
    }
    if predicted is not None:
        fields["predicted_s"] = np.stack([predicted.sections[name] for name in SECTIONS], axis=1).tolist()
    return fields


@dataclass(frozen=True)
class LayoutFigures:
    """A layout in a case."""

    fields: dict[str, Any]  # as `to_fields` makes them

    @cached_property
    def seconds(self) -> Times:
        """Processor time of every repeat, rank and section, [N, P, S]."""
        return np.asarray(self.fields["seconds"], float)

    @cached_property
    def usual_s(self) -> Times:
        """The same, medians over the repeats, [P, S]."""
        usual: Times = np.median(self.seconds, axis=0)
        return usual

    @cached_property
    def critical_s(self) -> Times:
        """The critical path of every repeat, [N]."""
        paths: Times = self.seconds.max(axis=1).sum(axis=1)
        return paths

    @cached_property
    def work_s(self) -> Times:
        """What each rank does, [P]."""
        work: Times = self.usual_s.sum(axis=1)
        return work

    @property
    def work_imbalance(self) -> float:
        """The most work of a rank over the mean; 1: all alike."""
        return float(self.work_s.max() / self.work_s.mean())

    @cached_property
    def idle_shares(self) -> Times:
        """Of the critical path, for which each rank waits, [P]."""
        path_s = self.usual_s.max(axis=0).sum()
        shares: Times = 1.0 - self.work_s / path_s
        return shares

    @property
    def is_predicted(self) -> bool:
        """Whether the simulator was asked, too."""
        return "predicted_s" in self.fields

    @cached_property
    def predicted_ratios(self) -> Times:
        """Predicted over measured time of each rank and section, [P, S]."""
        ratios: Times = np.asarray(self.fields["predicted_s"], float) / self.usual_s
        return ratios

    @cached_property
    def predicted_work_ratios(self) -> Times:
        """Predicted over measured work of each rank, [P]."""
        ratios: Times = np.asarray(self.fields["predicted_s"], float).sum(axis=1) / self.work_s
        return ratios


def figures_of(record: dict[str, Any]) -> dict[str, LayoutFigures]:
    """Return the layouts of a record."""
    return {name: LayoutFigures(fields) for name, fields in record["layouts"].items()}


def speed_ups(figures: dict[str, LayoutFigures], layout: str) -> list[float]:
    """Return how much faster than the baseline a layout was in each repeat."""
    ratios: list[float] = (figures[BASELINE].critical_s / figures[layout].critical_s).tolist()
    return ratios
