"""From records of whole models to the figures of the sliced experts paper."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import truediv
from typing import Any, Literal

import msgspec

from moeflow.bench.records import Record
from studies.parallel.paper_points import Point
from studies.parallel.published_layouts import DEEPSPEED
from studies.parallel.whole_model import LayerTimes, ModelRun

Clock = Literal["wall_s", "processor_s"]
Stack = tuple[list[LayerTimes], ...]  # of each rank


@dataclass(frozen=True)
class Setting:
    """A record's setting, and its figures by arm."""

    record: Record

    @cached_property
    def point(self) -> Point:
        """The setting."""
        return msgspec.convert(self.record["point"], Point)

    @cached_property
    def runs(self) -> dict[str, list[list[ModelRun]]]:
        """What each rank measured in each repeat, by arm."""
        found: dict[str, Any] = self.record["runs"]
        return {arm: msgspec.convert(runs, list[list[ModelRun]]) for arm, runs in found.items()}

    def encoder_s(self, arm: str, clock: Clock = "wall_s") -> float:
        """Return the time of the whole encoder: the median of the repeats."""
        slowest: list[float] = [max(getattr(run.encode, clock) for run in ranks) for ranks in self.runs[arm]]
        return statistics.median(slowest)

    def layer_times(self, arm: str, *, is_encoder: bool, clock: Clock = "wall_s") -> list[list[float]]:
        """Return the times of each layer with experts, of all repeats and steps: those of the slowest rank."""
        passes = [stack for ranks in self.runs[arm] for stack in _passes(ranks, is_encoder=is_encoder)]
        slowest = [
            [max(getattr(it, clock) for it in layers) for layers in zip(*stack, strict=True)] for stack in passes
        ]
        return [list(times) for times in zip(*slowest, strict=True)]

    def speed_up(self, arm: str, *, has_decoder: bool = False, clock: Clock = "wall_s") -> float:
        """Return the mean over layers of the baseline's time over the arm's, for an encoder or an encoder-decoder."""
        stacks = (True, False) if has_decoder else (True,)
        theirs, ours = (
            [
                statistics.median(times)
                for is_encoder in stacks
                for times in self.layer_times(name, is_encoder=is_encoder, clock=clock)
            ]
            for name in (DEEPSPEED, arm)
        )
        return statistics.fmean(map(truediv, theirs, ours))

    def sections(self, arm: str, *, is_encoder: bool, layer: int) -> dict[str, tuple[float, float]]:
        """Return mean and standard deviation over ranks of each section of a layer, averaged over passes."""
        found: dict[str, list[tuple[float, float]]] = {}
        for ranks in self.runs[arm]:
            for stack in _passes(ranks, is_encoder=is_encoder):
                of_ranks = [times[layer].sections for times in stack]
                for name in of_ranks[0]:
                    values = [sections[name] for sections in of_ranks]
                    found.setdefault(name, []).append((statistics.mean(values), statistics.pvariance(values)))
        return {
            name: (statistics.mean(mean for mean, _ in each), statistics.mean(var for _, var in each) ** 0.5)
            for name, each in found.items()
        }


def _passes(ranks: Sequence[ModelRun], *, is_encoder: bool) -> list[Stack]:
    """Return the stacks of the ranks in each pass."""
    if is_encoder:
        return [tuple(run.encoder for run in ranks)]
    return [tuple(steps) for steps in zip(*(run.decoder for run in ranks), strict=True)]
