"""Where each expert of a loaded model is, and how often passes found it there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from moeflow.core.engine_config import EngineConfig
from moeflow.core.observation import TIERS
from moeflow.experts.cache.expert_needs import ExpertNeeds

if TYPE_CHECKING:
    from moeflow.engine.expert_store import ExpertStore
    from moeflow.engine.ranks.rank_upkeep import RankUpkeep
    from moeflow.engine.ranks.ranks import Ranks
    from moeflow.experts.hybrid.hybrid_pool import HybridPool

GPU, RAM, SLOT, DISK, ELSEWHERE = range(len(TIERS))
_HERE: Final = ("", "127.0.0.1", "::1", "localhost")  # hosts of ranks on this machine

Tiers = NDArray[np.uint8]


class Residency:
    """The experts of one engine. Also counts what passes need from a cache, while it counts."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        disk: ExpertStore | None = None,
        hybrid: HybridPool | None = None,
        ranks: tuple[Ranks, RankUpkeep] | None = None,
    ) -> None:
        """`disk`: experts come from there; `hybrid`: a GPU and the CPU have some each; `ranks` share the model."""
        self._config = config
        self._disk, self._hybrid, self._ranks = disk, hybrid, ranks
        self.needs: ExpertNeeds | None = None  # while it counts, if there is a cache

    def count(self, num_layers: int, num_experts: int) -> None:
        """Count hits and misses from now on. Not during a pass."""
        if self._disk is not None:
            self.needs = ExpertNeeds(num_layers, num_experts)
            self._disk.cache.count_needs(self.needs)

    def end(self) -> None:
        """Count no more. Not during a pass."""
        if self._disk is not None:
            self._disk.cache.count_needs(None)
            self.needs = None

    def tiers(self, num_layers: int, num_experts: int) -> Tiers:
        """Return the place in `TIERS` of each expert's fastest copy: [L, E]. L are the layers with routers."""
        found = np.full((num_layers, num_experts), self._usual_tier, np.uint8)
        if self._disk is not None:
            self._note_disk(found, self._disk)
        if self._ranks is not None:
            self._note_ranks(found, *self._ranks)
        if self._config.offload is not None and self._config.offload.num_resident_experts:
            found[:, -self._config.offload.num_resident_experts :] = GPU
        if self._hybrid is not None:
            found[self._hybrid.is_on_gpu] = GPU
        return found

    @property
    def _usual_tier(self) -> int:
        """Return where all experts are if nothing else is known."""
        is_on_gpu = self._config.device != "cpu" and self._config.offload is None and self._hybrid is None
        return GPU if is_on_gpu else RAM

    def _note_disk(self, found: Tiers, disk: ExpertStore) -> None:
        found[:] = DISK
        if disk.pool.remote is not None:
            found[disk.pool.remote.placed.reshape(found.shape)] = ELSEWHERE
        found[disk.cache.are_resident()] = SLOT

    def _note_ranks(self, found: Tiers, ranks: Ranks, upkeep: RankUpkeep) -> None:
        """Note experts that only ranks on other machines have; slices of an expert are everywhere."""
        if upkeep.experts is None:
            return
        is_here = [host in _HERE for host in ranks.hosts]
        for layer, homes in enumerate(upkeep.experts.balancer.placement.homes):
            for expert, of_expert in enumerate(homes):
                if not any(is_here[rank] for rank in of_expert):
                    found[layer, expert] = ELSEWHERE
