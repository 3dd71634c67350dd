"""Where ranks, or engines, of other machines join, if there are any."""

from __future__ import annotations

from typing import Final

from moeflow.core.address import LOOPBACK, parse_address
from moeflow.core.errors import ConfigError
from moeflow.core.parallel_config import RAY_PLACEMENTS, JoinConfig, NodeReplicas, RayConfig
from moeflow.kernels.on_demand import on_demand
from moeflow.settings.settings import Settings

with on_demand(__name__):
    from moeflow.parallel.tcp import cluster_token

_OWN_CLUSTER: Final = "auto"  # as Ray's own tools call it


def choose_join(settings: Settings, num_ranks: int) -> JoinConfig | None:
    """Return where the others of so many ranks join; None: all are processes of this machine.

    Raises: ConfigError if there is but one rank, if there are several engines, if it is no address, or if Ray cannot
    start them.
    """
    if settings.num_replicas is not None and (settings.ray_address or settings.listen_ranks):
        if num_ranks > 1:
            raise ConfigError("either ranks or replicas are on other machines: remove --replicas, or --ranks")
        return None  # each replica is an engine of one process
    ray = _choose_ray(settings)
    if settings.listen_ranks is None:
        if ray is not None:
            raise ConfigError(
                "Ray starts engines (--ray-address) as replicas: set their number (--replicas). Or it starts ranks, "
                "which must reach the first one: set their number (--ranks) and its address (--listen-ranks HOST:PORT)"
            )
        return None
    if num_ranks == 1:
        raise ConfigError(
            "no rank can join (--listen-ranks) an engine of one rank: set the number of ranks, this one included "
            "(--ranks, or --stages)"
        )
    host, port = parse_address(settings.listen_ranks, default_host=LOOPBACK)
    return JoinConfig(host=host, port=port, token_file=_token_file(settings), ray=ray)


def choose_node_replicas(settings: Settings) -> NodeReplicas | None:
    """Return the engines of other machines; None: all are processes of this one. Raises: ConfigError."""
    number, ray = settings.num_replicas, _choose_ray(settings)
    if settings.max_replicas is not None and (number is None or ray is None):
        raise ConfigError(
            "the number of replicas changes (--max-replicas) on a Ray cluster only: set --replicas, --ray-address"
        )
    if number is None or (ray is None and settings.listen_ranks is None):
        return None
    most = settings.max_replicas or number
    if most < number:
        raise ConfigError(f"{most} replicas at most (--max-replicas) are fewer than the least, {number} (--replicas)")
    host, port = "", 0
    if settings.listen_ranks is not None:
        host, port = parse_address(settings.listen_ranks, default_host=LOOPBACK)
    join = JoinConfig(host=host, port=port, token_file=_token_file(settings), ray=ray)
    return NodeReplicas(number=number, most=most, join=join)


def _token_file(settings: Settings) -> str:
    return str((settings.cluster_token_file or cluster_token.default_token_file(settings.cache_dir)).absolute())


def _choose_ray(settings: Settings) -> RayConfig | None:
    """Return which Ray cluster starts ranks, or engines; None: none does. Raises: ConfigError."""
    address, placement = settings.ray_address, settings.ray_placement
    if placement not in RAY_PLACEMENTS:
        raise ConfigError(f"ray_placement {placement!r} is unknown; use one of {', '.join(RAY_PLACEMENTS)}")
    if address is None:
        if placement != "strict-spread":
            raise ConfigError("--ray-placement needs a Ray cluster: set its address (--ray-address)")
        return None
    if not settings.is_served:
        raise ConfigError("Ray starts engines (--ray-address) for `moeflow serve` and `moeflow batch` only")
    if "://" in address:
        raise ConfigError(
            f"{address!r} is an address for Ray's clients: make this machine a node (`ray start --address=HOST:6379`), "
            "and say --ray-address auto"
        )
    if address != _OWN_CLUSTER:
        parse_address(address)
    return RayConfig(address=address, shares_nodes=placement == "spread")
