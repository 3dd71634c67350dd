"""Where the ranks of other machines join, if there are any."""

from __future__ import annotations

from moeflow.core.address import LOOPBACK, format_address, parse_address
from moeflow.core.errors import ConfigError
from moeflow.core.parallel_config import JoinConfig
from moeflow.parallel.cluster_token import default_token_file
from moeflow.planner.choices.processor_choice import Reasons
from moeflow.planner.settings import Settings


def choose_join(settings: Settings, num_ranks: int, reasons: Reasons) -> JoinConfig | None:
    """Return where ranks join; None: all are processes of this machine.

    Raises: ConfigError if there is but one, or if it is no address.
    """
    if settings.listen_ranks is None:
        return None
    if num_ranks == 1:
        raise ConfigError(
            "nobody can join (--listen-ranks) an engine of one rank: say how many there are, this one counted (--ranks)"
        )
    host, port = parse_address(settings.listen_ranks, default_host=LOOPBACK)
    file = (settings.cluster_token_file or default_token_file(settings.cache_dir)).absolute()
    reasons.append(("other ranks", f"join at {format_address(host, port)}, with the token in {file}"))
    return JoinConfig(host=host, port=port, token_file=str(file))
