"""Where the ranks of other machines join, if there are any."""

from __future__ import annotations

from moeflow.core.address import LOOPBACK, parse_address
from moeflow.core.errors import ConfigError
from moeflow.core.parallel_config import JoinConfig
from moeflow.parallel.tcp.cluster_token import default_token_file
from moeflow.planner.settings import Settings


def choose_join(settings: Settings) -> JoinConfig | None:
    """Return where ranks join; None: all are processes of this machine.

    Raises: ConfigError if there is but one rank, if there are several engines, or if it is no address.
    """
    if settings.listen_ranks is None:
        return None
    if (settings.num_ranks or 1) == 1:
        raise ConfigError(
            "nobody can join (--listen-ranks) an engine of one rank: say how many there are, this one counted (--ranks)"
        )
    if (settings.num_replicas or 1) > 1:
        raise ConfigError("ranks of other machines (--listen-ranks) join one engine: leave --replicas away")
    host, port = parse_address(settings.listen_ranks, default_host=LOOPBACK)
    file = (settings.cluster_token_file or default_token_file(settings.cache_dir)).absolute()
    return JoinConfig(host=host, port=port, token_file=str(file))
