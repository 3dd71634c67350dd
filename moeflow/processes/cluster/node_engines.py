"""Replicas of an engine on other machines: Ray or their users start keepers there, which connect to this server."""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path

from moeflow.checkpoint.identity import fingerprint_of
from moeflow.core.address import EVERYWHERE, format_address
from moeflow.core.engine_config import EngineConfig
from moeflow.core.parallel_config import NodeReplicas
from moeflow.engine.ranks.joining import own_application
from moeflow.parallel.tcp.cluster_token import ensure_token
from moeflow.parallel.tcp.same_bits import why_bits_differ
from moeflow.processes.cluster.ray_launcher import PLACEMENT_S, RayLauncher
from moeflow.processes.cluster.ray_messages import LaunchOrder, RankOrder
from moeflow.processes.nodes.engine_places import EnginePlaces
from moeflow.processes.nodes.messages import Offer

logger = logging.getLogger(__name__)


async def start_places(config: EngineConfig, nodes: NodeReplicas) -> tuple[EnginePlaces, RayLauncher | None]:
    """Listen for keepers of so many engines, and return their places, and their launcher if Ray starts them.

    Raises: ConfigError if there is no Ray or this server cannot listen; CheckpointError; EngineError if Ray fails.
    """
    join = nodes.join
    token = ensure_token(Path(join.token_file))
    own = own_application(config.num_threads, config.cpu_isa, 0)
    fingerprint = await asyncio.to_thread(fingerprint_of, config.model_path)

    def objection(offer: Offer) -> str:
        return why_bits_differ(offer, own, "the server")

    awaited = "a machine that runs `moeflow join --replica`"
    if join.ray is not None:
        awaited = f"free CPUs of the Ray cluster (`ray status`), {config.num_threads} (--threads)"
    places = EnginePlaces(token, fingerprint, objection, awaited)
    places.add_keepers(nodes.number)
    if join.ray is None:
        places.open(join.host, join.port)
        text = "waiting for %d engines: run on each of their machines, with a copy of %s,\n  moeflow join %s --replica"
        host = socket.gethostname() if join.host in EVERYWHERE else join.host
        logger.warning(text, nodes.number, join.token_file, format_address(host, places.port))
        return places, None

    def order_at(own_address: str) -> LaunchOrder:
        if not places.port:
            places.open(join.host or own_address, join.port)
        host = own_address if places.host in EVERYWHERE else places.host
        order = RankOrder(host, places.port, token.hex(), config.num_threads, keeps_engine=True)
        return LaunchOrder(places.renew_keepers(), True, PLACEMENT_S, order)

    try:
        return places, await RayLauncher.start(join.ray.address, order_at)
    except BaseException:
        places.close()
        raise
