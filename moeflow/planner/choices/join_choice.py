"""The engines, or ranks, of other machines, if there are any."""

from __future__ import annotations

import math
from typing import Final

from moeflow.core.address import LOOPBACK, format_address, parse_address
from moeflow.core.errors import ConfigError
from moeflow.core.parallel_config import RAY_PLACEMENTS, JoinConfig, NodeReplicas, RayConfig
from moeflow.kernels.on_demand import on_demand
from moeflow.planner.choices.processor_choice import Reasons
from moeflow.settings.settings import Settings

with on_demand(__name__):
    from moeflow.parallel.tcp import cluster_token

_OWN_CLUSTER: Final = "auto"  # as Ray's own tools call it


def choose_node_replicas(settings: Settings, num_ranks: int) -> NodeReplicas | None:
    """Return the engines, of so many ranks each, that have processes on other machines; None: there are none.

    Raises: ConfigError.
    """
    number, ray = settings.num_replicas, _choose_ray(settings)
    if settings.max_replicas is not None and (number is None or ray is None):
        raise ConfigError(
            "the number of replicas changes (--max-replicas) on a Ray cluster only: set --replicas, --ray-address"
        )
    first_token_s = settings.target_first_token_s
    if first_token_s is not None and settings.max_replicas is None:
        raise ConfigError(
            "a target for the first token (--target-first-token) needs replicas to add: set their most (--max-replicas)"
        )
    if first_token_s is not None and not 0 < first_token_s < math.inf:
        raise ConfigError(f"target_first_token_s must be a positive number of seconds, not {first_token_s:g}")
    if not settings.is_spread:
        return None
    if number is None and num_ranks == 1:
        by = "--listen-ranks" if ray is None else "--ray-address"
        raise ConfigError(
            f"other machines ({by}) have nothing to do for one engine of one rank: set the number of ranks (--ranks, "
            "or --stages), this machine's included. Or set the number of engines (--replicas)"
        )
    most = settings.max_replicas or number or 1
    if most < (number or 1):
        raise ConfigError(f"{most} replicas at most (--max-replicas) are fewer than the least, {number} (--replicas)")
    host, port = "", 0
    if settings.listen_ranks is not None:
        host, port = parse_address(settings.listen_ranks, default_host=LOOPBACK)
    token_file = settings.cluster_token_file or cluster_token.default_token_file(settings.cache_dir)
    join = JoinConfig(host=host, port=port, token_file=str(token_file.absolute()), ray=ray)
    return NodeReplicas(
        number=number or 1, most=most, join=join, has_first_here=number is None, first_token_s=first_token_s
    )


def explain_nodes(nodes: NodeReplicas, num_ranks: int, reasons: Reasons) -> None:
    """Add where processes on other machines are, and how they start."""
    join = nodes.join
    number = num_ranks - 1 if nodes.has_first_here else nodes.number * num_ranks
    machines = "1 other machine" if number == 1 else f"{number} other machines"
    if join.ray is None:
        how = f"that run `moeflow join {format_address(join.host, join.port)}`, with the token in {join.token_file}"
    else:
        placement = f", {join.ray.placement}" if num_ranks > 1 else ""
        how = f"that Ray finds ({join.ray.address}{placement})"
    what = "a rank each" if num_ranks > 1 else "an engine each"
    of_each = f"; {nodes.number} engines of {num_ranks} ranks" if num_ranks > 1 and not nodes.has_first_here else ""
    reasons.append(("other machines", f"{what}, on {machines} {how}{of_each}"))


def _choose_ray(settings: Settings) -> RayConfig | None:
    """Return which Ray cluster starts ranks, or engines; None: none does. Raises: ConfigError."""
    address, placement = settings.ray_address, settings.ray_placement
    if placement not in RAY_PLACEMENTS:
        raise ConfigError(f"ray_placement {placement!r} is unknown; use one of {', '.join(RAY_PLACEMENTS)}")
    if address is None:
        if placement != RAY_PLACEMENTS[0]:
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
    return RayConfig(address=address, placement=placement)
