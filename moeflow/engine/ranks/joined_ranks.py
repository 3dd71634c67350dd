"""The other ranks of an engine on other machines: waited for, given each pass, left alone at the end.

They connect to this process, prove that they have the cluster's token, and show that they would compute the same bits:
versions, processor, checkpoint. When the engine ends they wait for the next one, so that a restart finds them again.
"""

from __future__ import annotations

import logging
import secrets
import socket
from collections.abc import Sequence
from pathlib import Path

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.checkpoint.identity import content_fingerprint
from moeflow.core.address import EVERYWHERE, format_address
from moeflow.core.engine_config import EngineConfig
from moeflow.core.errors import GroupError
from moeflow.core.parallel_config import JoinConfig, ParallelConfig
from moeflow.core.units import format_bytes
from moeflow.engine.ranks.joining import (
    PASS,
    Assignment,
    Invitation,
    JoinRequest,
    own_application,
    say,
)
from moeflow.engine.ranks.loading_signs import wait_until_loaded
from moeflow.engine.ranks.ranks import Ranks
from moeflow.engine.ranks.reception import RankCandidate, Reception
from moeflow.models.registry import read_model_config
from moeflow.parallel.tcp.cluster_token import ensure_token
from moeflow.parallel.tcp.endpoint import Endpoint
from moeflow.parallel.tcp.link import Link
from moeflow.parallel.tcp.same_bits import why_bits_differ
from moeflow.parallel.tcp.tcp_group import TcpGroup
from moeflow.planner.choices.offload_plan import costs_of
from moeflow.planner.choices.rank_choice import RankMemory
from moeflow.planner.costs.process_memory import PROCESS_BYTES

logger = logging.getLogger(__name__)


class JoinedRanks(Ranks):
    """Processes that have run `moeflow join`."""

    def __init__(self, checkpoint: Checkpoint, config: EngineConfig, parallel: ParallelConfig) -> None:
        """Wait for them to join; they begin to load. Blocks: until all are there.

        Raises: GroupError if they do not come in time; ConfigError if this process cannot listen or has no token.
        """
        join = parallel.join
        assert join is not None, "ranks join"
        needed = _Needed(checkpoint, config, parallel)
        num_others = parallel.num_ranks - 1
        self._reception = Reception(
            num_others, Invitation(config.model_path), content_fingerprint(checkpoint), needed.objection
        )
        self._endpoint = Endpoint(ensure_token(Path(join.token_file)))
        try:
            self._endpoint.listen(join.host, join.port, self._reception.take_in)
            logger.warning(_what_to_do(num_others, join))
            self._links = self._assign(self._reception.wait(join.timeout_s), config, parallel, join)
        except BaseException:
            self._leave()
            raise
        self.group = TcpGroup(0, self._links, parallel.timeout_s)

    @property
    def hosts(self) -> Sequence[str]:
        """See `Ranks`."""
        return ["", *(link.host for link in self._links.values())]

    def wait_until_loaded(self) -> None:
        """See `Ranks`."""
        for link in self._links.values():
            wait_until_loaded(link)
        logger.warning("all %d ranks are there", self.group.size)

    def close(self) -> None:
        """See `Ranks`."""
        self.group.abort("the first rank has ended")
        self._leave()

    def _assign(
        self, candidates: list[RankCandidate], config: EngineConfig, parallel: ParallelConfig, join: JoinConfig
    ) -> dict[int, Link]:
        """Tell each which rank it is."""
        addresses = [(join.host, join.port), *((it.link.host, it.candidacy.port) for it in candidates)]
        group_id = secrets.token_bytes(16)
        links = {rank: candidate.link for rank, candidate in enumerate(candidates, 1)}
        for rank, link in links.items():
            link.peer = f"rank {rank} ({link.address})"
            say(link, Assignment(rank, config, parallel.timeout_s, group_id, addresses))
        return links

    def _leave(self) -> None:
        self._reception.close()
        self._endpoint.close()

    def _tell_all(self, message: bytes) -> None:
        for link in self._links.values():
            link.send_message(PASS, message)

    def _look(self) -> None:
        for link in self._links.values():
            link.check_idle()

    def _note_ending(self, error: GroupError) -> None:
        """Note that it came from outside: cut networks and lost machines are no fault of a request.

        One that does kill a rank on another machine is found all the same, only later.
        """
        error.is_from_outside = True


class _Needed:
    """What a process must have to be a rank."""

    def __init__(self, checkpoint: Checkpoint, config: EngineConfig, parallel: ParallelConfig) -> None:
        costs = costs_of(read_model_config(checkpoint), config)
        weight_bytes = max(RankMemory.of(costs, parallel).weight_bytes)
        self._num_bytes = weight_bytes + config.kv_cache_bytes + PROCESS_BYTES
        self._own = own_application(config.num_threads, config.cpu_isa, 0)

    def objection(self, theirs: JoinRequest) -> str:
        """Return why a process cannot be a rank; empty: it can."""
        if reason := why_bits_differ(theirs, self._own, "the first rank"):
            return reason
        if theirs.available_bytes < self._num_bytes:
            return (
                f"it has {format_bytes(theirs.available_bytes)} of memory free and needs "
                f"{format_bytes(self._num_bytes)}: use more ranks (--ranks), or a smaller format or KV cache"
            )
        return ""


def _what_to_do(num_others: int, join: JoinConfig) -> str:
    if join.ray is not None:
        return f"waiting for {num_others} other rank{'s' if num_others > 1 else ''}, which Ray starts"
    host = socket.gethostname() if join.host in EVERYWHERE else join.host
    return (
        f"waiting for {num_others} other rank{'s' if num_others > 1 else ''}: run on each of their machines, with a "
        f"copy of {join.token_file},\n  moeflow join {format_address(host, join.port)}"
    )
