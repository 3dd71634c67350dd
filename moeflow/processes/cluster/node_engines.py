"""Engines and ranks on other machines: Ray or their users start keepers there, which connect to this server."""

from __future__ import annotations

import asyncio
import logging
import socket
from contextlib import closing
from pathlib import Path

from moeflow.checkpoint.identity import content_fingerprint
from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.address import EVERYWHERE, format_address
from moeflow.core.engine_config import EngineConfig
from moeflow.core.parallel_config import JoinConfig, NodeReplicas
from moeflow.core.units import format_bytes
from moeflow.models.registry import read_model_config
from moeflow.parallel.tcp.cluster_token import ensure_token
from moeflow.parallel.tcp.same_bits import OwnBits, why_bits_differ
from moeflow.planner.choices.offload_plan import costs_of
from moeflow.planner.choices.rank_choice import RankMemory
from moeflow.planner.costs.process_memory import PROCESS_BYTES
from moeflow.processes.cluster.ray_launcher import PLACEMENT_S, RayLauncher
from moeflow.processes.cluster.ray_messages import KeeperOrder, LaunchOrder
from moeflow.processes.nodes.engine_places import EnginePlaces, RankPlaces
from moeflow.processes.nodes.messages import Offer

logger = logging.getLogger(__name__)


async def start_places(config: EngineConfig, nodes: NodeReplicas) -> tuple[EnginePlaces, RayLauncher | None]:
    """Listen for keepers of so many engines, and return their places, and their launcher if Ray starts them.

    Raises: ConfigError if there is no Ray or this server cannot listen; CheckpointError; EngineError if Ray fails.
    """
    join = nodes.join
    token = ensure_token(Path(join.token_file))
    needed = await asyncio.to_thread(_Needed, config)
    ranks = RankPlaces(1 if config.parallel is None else config.parallel.num_ranks, nodes.has_first_here)
    awaited = "a machine that runs `moeflow join`"
    if join.ray is not None:
        awaited = f"free CPUs of the Ray cluster (`ray status`), {config.num_threads} (--threads)"
    places = EnginePlaces(token, needed.fingerprint, needed.objection, awaited, ranks)
    places.add_keepers(nodes.number)
    if join.ray is None:
        places.open(join.host, join.port)
        _tell_users(join, nodes.number * ranks.num_keepers)
        return places, None
    placement = join.ray.placement

    def order_at(own_address: str) -> LaunchOrder:
        if not places.port:
            places.open(join.host or own_address, join.port)
        host = own_address if places.host in EVERYWHERE else places.host
        keeper = KeeperOrder(host, places.port, token.hex(), config.num_threads)
        number = places.renew_keepers()
        return LaunchOrder(number, ranks.num_keepers, placement, ranks.has_first_here, PLACEMENT_S, keeper)

    try:
        return places, await RayLauncher.start(join.ray.address, order_at, places.lose)
    except BaseException:
        places.close()
        raise


class _Needed:
    """Properties that a machine must have to run an engine or a rank."""

    def __init__(self, config: EngineConfig) -> None:
        """Read the checkpoint. Raises: CheckpointError."""
        with closing(open_checkpoint(config.model_path)) as checkpoint:
            self.fingerprint = content_fingerprint(checkpoint)
            costs = costs_of(read_model_config(checkpoint), config)
        memory = RankMemory.of(costs, config.parallel)
        self._num_bytes = max(memory.weight_bytes) + config.kv_cache_bytes + PROCESS_BYTES
        self._has_ranks = config.parallel is not None
        self._own = OwnBits.of(config.cpu_isa)

    def objection(self, offer: Offer) -> str:
        """Return why a machine cannot be used; empty: it can."""
        if reason := why_bits_differ(offer, self._own, "the server"):
            return reason
        if self._has_ranks and offer.available_bytes < self._num_bytes:
            return (
                f"it has {format_bytes(offer.available_bytes)} of memory free and needs "
                f"{format_bytes(self._num_bytes)}: use more ranks (--ranks), or a smaller format or KV cache"
            )
        return ""


def _tell_users(join: JoinConfig, number: int) -> None:
    host = socket.gethostname() if join.host in EVERYWHERE else join.host
    machines = "1 other machine" if number == 1 else f"{number} other machines"
    text = "waiting for %s: run on each, with a copy of %s,\n  moeflow join %s"
    logger.warning(text, machines, join.token_file, format_address(host, join.port))
