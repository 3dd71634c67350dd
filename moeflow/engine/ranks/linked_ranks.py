"""Ranks of an engine as processes on any machines: they meet at known addresses, and get each pass over links.

Their places and their life are not decided here: see `processes/nodes`.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Final

from moeflow.core.engine_config import EngineConfig
from moeflow.core.errors import GroupError, MoeflowError
from moeflow.core.parallel_config import ParallelConfig
from moeflow.engine.ranks.computing import compute_passes
from moeflow.engine.ranks.loading_signs import LoadingSigns, wait_until_loaded
from moeflow.engine.ranks.ranks import Ranks
from moeflow.parallel.tcp.endpoint import Endpoint
from moeflow.parallel.tcp.link import Link
from moeflow.parallel.tcp.mesh import Meeting, meet
from moeflow.parallel.tcp.tcp_group import TcpGroup

logger = logging.getLogger(__name__)

_PASS: Final = "pass"  # the name of a message
_MEETING_S: Final = 60.0  # for the processes of all ranks to start and connect


class RankNetwork:
    """A process's links to all other ranks of its engine."""

    def __init__(self, parallel: ParallelConfig) -> None:
        """Meet the others. Blocks: until all are there. Raises: GroupError, ConfigError."""
        own = parallel.links
        assert own is not None, "each rank has a place"
        arrivals: queue.Queue[Link] = queue.Queue()
        self._endpoint = Endpoint(own.secret)
        try:
            self._endpoint.listen(*own.addresses[own.rank], arrivals.put)
            self.links = meet(Meeting(b"", own.rank), own.addresses, self._endpoint, {}, arrivals, _MEETING_S)
        except BaseException:
            self._endpoint.close()
            raise
        self.group = TcpGroup(own.rank, self.links, parallel.timeout_s)

    def close(self) -> None:
        """End the links."""
        self._endpoint.close()


class LinkedRanks(Ranks):
    """The other ranks, seen from the first one."""

    def __init__(self, parallel: ParallelConfig) -> None:
        """See `RankNetwork`."""
        self._network = RankNetwork(parallel)
        self._links = self._network.links
        self.group = self._network.group

    @property
    def hosts(self) -> Sequence[str]:
        """See `Ranks`."""
        return ["", *(link.host for _, link in sorted(self._links.items()))]

    def wait_until_loaded(self) -> None:
        """See `Ranks`."""
        for link in self._links.values():
            wait_until_loaded(link)

    def close(self) -> None:
        """See `Ranks`."""
        self.group.abort("the first rank has ended")
        self._network.close()

    def _tell_all(self, message: bytes) -> None:
        for link in self._links.values():
            link.send_message(_PASS, message)

    def _look(self) -> None:
        for link in self._links.values():
            link.check_idle()

    def _note_ending(self, error: GroupError) -> None:
        """Note that it came from outside: cut networks and lost machines are no fault of a request.

        A request that does kill a rank on another machine is found all the same, only later.
        """
        error.is_from_outside = True


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
            yield first.receive_message(_PASS, timeout_s=None)

    try:
        compute_passes(config, group, passes(), signs.end, signs.note_progress)
    except BaseException as error:
        group.abort(str(error) if isinstance(error, MoeflowError) else f"{type(error).__name__} {error}")
        raise
