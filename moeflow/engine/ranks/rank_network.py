"""A rank's links to the other ranks of its engine, on any machines: they meet at known addresses.

Their places and their life are not decided here: see `processes/nodes`.
"""

from __future__ import annotations

import queue
from typing import Final

from moeflow.core.parallel_config import ParallelConfig
from moeflow.parallel.tcp.endpoint import Endpoint
from moeflow.parallel.tcp.link import Link
from moeflow.parallel.tcp.mesh import meet
from moeflow.parallel.tcp.tcp_group import TcpGroup

PASS: Final = "pass"  # the name of a message of the first rank
_MEETING_S: Final = 3600.0  # a machine may get the model first; its keeper tells the server if it fails


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
            self.links = meet(own.rank, own.addresses, self._endpoint, arrivals, _MEETING_S)
        except BaseException:
            self._endpoint.close()
            raise
        self.group = TcpGroup(own.rank, self.links, parallel.timeout_s)

    def close(self) -> None:
        """End the links."""
        self._endpoint.close()
