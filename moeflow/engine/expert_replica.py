"""One of the replicas that share experts: its experts, its service for the others, and its links to them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch

from moeflow.core.engine_messages import ExpertStats, trial_stats
from moeflow.core.model_config import ModelConfig
from moeflow.core.parallel_config import ExpertParallelConfig
from moeflow.engine.in_flight_choice import InFlightChoice
from moeflow.models.layers.expert_shares import ExpertShares
from moeflow.parallel.placement.placement import ExpertPlacement
from moeflow.parallel.remote.expert_peers import ExpertPeers, MeetingPlace
from moeflow.parallel.remote.expert_service import ExpertService


class ExpertReplica:
    """One of the replicas that share the experts. `begin` once the model is loaded."""

    def __init__(self, config: ExpertParallelConfig, shape: ModelConfig) -> None:
        """Decide which experts it has."""
        self._config = config
        placement = ExpertPlacement.by_index(shape.num_moe_layers, shape.routing.num_experts, config.num_replicas)
        self.shares = ExpertShares(placement, config.replica)
        self.in_flight = InFlightChoice()
        self._service: ExpertService | None = None
        self._peers: ExpertPeers | None = None

    @property
    def others_experts(self) -> list[int]:
        """Those of each layer that other replicas compute."""
        own = self.shares.placement.held_by(self._config.replica, 0)
        return sorted(set(range(self.shares.num_experts)) - set(own))

    def begin(self, num_threads: int) -> None:
        """Compute for the others, with so many threads, and have them compute. Raises: ConfigError, OSError."""
        config = self._config
        self._service = ExpertService(num_threads, set_up=lambda: torch.set_num_threads(1))
        place = MeetingPlace(Path(config.folder))
        self._peers = ExpertPeers(config.replica, config.num_replicas, place, self.shares, self._service)
        self.shares.peers = self._peers.peers

    def add_stats(self, stats: ExpertStats) -> ExpertStats:
        """Return statistics with the work done for others, and by them."""
        if self._service is None:
            return stats
        shares, service = self.shares.stats, self._service.stats
        return msgspec.structs.replace(
            stats,
            trials=trial_stats(self.in_flight.trials),
            num_peers=sum(peer.is_connected for peer in self.shares.peers),
            peer_rows_sent_total=shares.num_rows_sent,
            peer_wait_s_total=self.shares.baton.idle_s,
            peer_pairs_served_total=service.num_pairs,
            peer_serve_s_total=service.computed_s,
            peer_pairs_taken_over_total=shares.num_pairs_taken_over,
        )

    def close(self) -> None:
        """End all links and the service."""
        if self._peers is not None:
            self._peers.close()
        if self._service is not None:
            self._service.close()
