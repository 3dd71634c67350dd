"""A rank after the first, on any machine: it loads its part of the model, and computes the passes that links bring."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing

from moeflow.core.engine_config import EngineConfig
from moeflow.core.errors import GroupError, MoeflowError
from moeflow.engine.ranks.computing import compute_passes
from moeflow.engine.ranks.loading_signs import LoadingSigns
from moeflow.engine.ranks.rank_network import PASS, RankNetwork

logger = logging.getLogger(__name__)


def compute_linked(config: EngineConfig) -> None:
    """Compute passes as a rank after the first, until the engine ends. Raises: what ends only this rank."""
    assert config.parallel is not None
    try:
        with closing(RankNetwork(config.parallel)) as network:
            _compute(config, network)
    except GroupError as error:  # the engine has ended, or its end has a reason elsewhere
        logger.info("the rank ends: %s", error)


def _compute(config: EngineConfig, network: RankNetwork) -> None:
    first, group = network.links[0], network.group
    signs = LoadingSigns(first)

    def passes() -> Iterator[bytes]:
        while True:
            yield first.receive_message(PASS, timeout_s=None)

    try:
        compute_passes(config, group, passes(), signs.end, signs.note_progress)
    except BaseException as error:
        group.abort(str(error) if isinstance(error, MoeflowError) else f"{type(error).__name__} {error}")
        raise
