"""Scans: passes that need nearly all experts of each layer, and prefetch those of the next layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moeflow.experts.cache.expert_loads import ExpertLoads
from moeflow.experts.cache.expert_states import ABSENT


@dataclass(frozen=True, slots=True)
class ScannedLayer:
    """The experts that a scan needs of a layer."""

    kept: list[int]  # resident since earlier passes
    read_ahead: list[int]  # resident, prefetched in this pass
    absent: list[int]  # loading ones first


class LayerScan:
    """The scan of a pass; the next pass begins without one."""

    def __init__(self, loads: ExpertLoads, num_layers: int, num_experts: int) -> None:
        """`num_experts` is the number in a layer."""
        self._loads = loads
        self._num_layers = num_layers
        self._num_experts = num_experts

    def at(self, layer: int, experts: Sequence[int], *, window: int) -> ScannedLayer:
        """Begin or continue a scan at a layer that needs these experts.

        Until the next pass, eviction looks ahead, and keeps all slots but `window` for later passes.
        """
        with self._loads.up_to_date():
            self._loads.victims.scan_at(layer, num_kept=self._loads.states.num_slots - window)
            first = layer * self._num_experts
            rank = {expert: place for place, expert in enumerate(self._loads.victims.best_first(layer))}
            states, awaited = (
                self._loads.states.all[first : first + self._num_experts],
                self._loads.states.awaited[first:],
            )
            found = ScannedLayer(
                kept=[expert for expert in experts if states[expert].slot >= 0 and not awaited[expert]],
                read_ahead=[expert for expert in experts if states[expert].slot >= 0 and awaited[expert]],
                absent=sorted(
                    (expert for expert in experts if states[expert].slot < 0),
                    key=lambda expert: (states[expert].slot == ABSENT, rank[expert]),
                ),
            )
            self._loads.states.end_prefetches(first, first + self._num_experts, [first + expert for expert in experts])
            return found

    def read_ahead(self, at_most: int) -> None:
        """Start to load the next experts of the scan, by falling score, until `at_most` are awaited."""
        with self._loads.up_to_date():
            assert self._loads.victims.scan is not None
            room = at_most - int(self._loads.states.awaited.sum())
            if room > 0:
                self._loads.load_ahead(self._absent_after(self._loads.victims.scan.layer), room)

    def _absent_after(self, layer: int) -> Iterator[int]:
        """Yield the numbers of the absent experts of later layers, in each layer by falling score."""
        for following in range(layer + 1, self._num_layers):
            for expert in self._loads.victims.best_first(following):
                number = following * self._num_experts + expert
                if self._loads.states.all[number].slot == ABSENT and not self._loads.is_elsewhere[number]:
                    yield number
