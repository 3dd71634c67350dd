"""The other ranks of an engine as processes on any machines, which get each pass over links."""

from __future__ import annotations

from collections.abc import Sequence

from moeflow.core.errors import GroupError
from moeflow.core.parallel_config import ParallelConfig
from moeflow.engine.ranks.loading_signs import wait_until_loaded
from moeflow.engine.ranks.rank_network import PASS, RankNetwork
from moeflow.engine.ranks.ranks import Ranks


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
            link.send_message(PASS, message)

    def _look(self) -> None:
        for link in self._links.values():
            link.check_idle()

    def _note_ending(self, error: GroupError) -> None:
        """Note that it came from outside: cut networks and lost machines are no fault of a request.

        A request that does kill a rank on another machine is found all the same, only later.
        """
        error.is_from_outside = True
