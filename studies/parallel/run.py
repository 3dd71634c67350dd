"""Measures cases, alternating between all layouts; the first round is a warm-up.

Alternation makes a drift of the machine hit all layouts alike.

Results are checked in the warm-up. A layout that computes something else than one process does is an error, not a
figure.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

import msgspec
import numpy as np

from moeflow.core.errors import CapacityError, ConfigError, EngineError
from moeflow.core.hardware import Machine
from moeflow.core.units import format_bytes
from moeflow.parallel.placement.layouts import CAPACITY, CAPACITY_DROPLESS
from moeflow.planner.hardware.host import host_resources
from moeflow.planner.hardware.this_machine import how_measured
from studies.harness.interleaved import interleaved
from studies.parallel.case import Case, LayerShape
from studies.parallel.figures import to_fields
from studies.parallel.layer_cost import padded_rows
from studies.parallel.meter import SECTIONS
from studies.parallel.prediction import predict
from studies.parallel.rank import RankRun, Task
from studies.parallel.rank_processes import RankProcesses
from studies.parallel.rank_rates import Measured
from studies.parallel.shared_weights import shared_bytes

MAX_ERROR: Final = 1e-4  # of sums that are added up in another order, over the largest
PADDED_COPIES: Final = 4  # of the padded rows, that a rank has at once


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelStudy:
    """What to measure of each case."""

    layouts: tuple[str, ...]
    repeats: int
    machine: Machine | None  # that is predicted on; None: nothing is

    def num_passes(self, cases: Sequence[Case]) -> int:
        """Return how often `on_pass` will be called."""
        return len(cases) * len(self.layouts) * (self.repeats + 1)

    def run(
        self, cases: Sequence[Case], on_pass: Callable[[], None], say: Callable[[str], None]
    ) -> Generator[dict[str, Any], None, None]:
        """Yield the fields of each case's record; ranks are started anew for another layer.

        `on_pass` is called after each pass through the layer, `say` with what is being done.
        Raises: ConfigError, CapacityError before anything is measured; GroupError if a rank is lost; EngineError if a
        result is wrong.
        """
        for case in cases:
            check(case, self.layouts)
        for layer, group in groupby(cases, lambda case: case.layer):
            with RankProcesses(layer, _counting(layer, say)) as ranks:
                measured = None
                if self.machine is not None:
                    say("what predictions start from")
                    measured = ranks.measure_rates()
                for case in group:
                    say(describe(case))
                    yield self._measure(case, ranks, measured, on_pass)

    def _measure(
        self, case: Case, ranks: RankProcesses, measured: Measured | None, on_pass: Callable[[], None]
    ) -> dict[str, Any]:
        runs: dict[str, list[list[RankRun]]] = {name: [] for name in self.layouts}
        for repeat, name in interleaved(self.layouts, self.repeats + 1):
            runs[name].append(ranks.run(Task(case, name, is_checked=repeat == 0)))
            on_pass()
        predicted = predict(case, self.machine, self.layouts, measured) if self.machine and measured else {}
        num_choices = sum(case.num_tokens) * case.layer.top_k
        fields = {name: to_fields(found, num_choices, predicted.get(name)) for name, found in runs.items()}
        for name, of_layout in fields.items():
            check_result(name, is_equal=of_layout["is_equal"], error=of_layout["error"])
            for timed in ("seconds", "wall_s"):
                del of_layout[timed][0]  # the warm-up
        return {
            **msgspec.to_builtins(case),
            "sections": list(SECTIONS),
            "num_cores": host_resources().num_cores,
            "predicted_on": how_measured(self.machine) if self.machine else None,
            "predicted_from": None if measured is None else msgspec.to_builtins(measured),
            "layouts": fields,
        }


def describe(case: Case) -> str:
    """Return what tells a case from others of a grid."""
    tokens = f"{max(case.num_tokens):,} tokens a rank"
    return f"{case.layer.num_experts} experts, skew {case.router_skew:g}, {tokens}"


def check(case: Case, layouts: Sequence[str]) -> None:
    """Raises: ConfigError if a case makes no sense, CapacityError if it does not fit into memory."""
    layer = case.layer
    if layer.width < layer.num_ranks:
        raise ConfigError(f"{layer.num_ranks} ranks cannot each have a slice of {layer.width} units: take fewer ranks")
    need, have = needed_bytes(case, layouts), host_resources().available_bytes
    if need > have:
        raise CapacityError(
            f"{describe(case)}: needs {format_bytes(need)}, and there are {format_bytes(have)}: take fewer tokens, "
            "experts or layouts, or smaller experts"
        )


def needed_bytes(case: Case, layouts: Sequence[str]) -> int:
    """Return about what a case takes in memory: weights, what all ranks have of all tokens, and padded rows."""
    layer = case.layer
    row_bytes = 4 * layer.hidden
    loads = [
        int(np.bincount(ids.ravel()).max()) if len(ids) else 0
        for ids in np.split(case.topk_ids(), np.cumsum(case.num_tokens)[:-1])
    ]
    by_factor = padded_rows(case.capacity_factor, layer.top_k, max(case.num_tokens), layer.num_experts)
    rows = {CAPACITY: by_factor, CAPACITY_DROPLESS: max(loads)}
    padded = layer.num_ranks * layer.num_experts * max((rows.get(name, 0) for name in layouts), default=0)
    pairs = layer.num_ranks * sum(case.num_tokens) * layer.top_k * (layer.width + layer.hidden) * 4
    return shared_bytes(layer) + PADDED_COPIES * padded * row_bytes + 2 * pairs


def check_result(layout: str, *, is_equal: bool, error: float) -> None:
    """Raises: EngineError if a result is not what one process computes; that of slices may differ in the last bits."""
    if is_equal or (layout == "sliced" and error <= MAX_ERROR):
        return
    raise EngineError(f"layout {layout} computes something else than one process (error {error:.1e}): this is a bug")


def _counting(layer: LayerShape, say: Callable[[str], None]) -> Callable[[], None]:
    """Return what to call after each expert that is packed."""
    packed = 0

    def count() -> None:
        nonlocal packed
        packed += 1
        say(f"packing {packed} of {layer.num_experts} experts")

    return count
