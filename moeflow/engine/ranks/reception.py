"""Takes in the processes that want to be ranks, until there are enough; tells the others why they are not taken.

Each that connects is looked at in a thread of its own. It stays open after the engine has begun, to refuse late
processes with a reason.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from moeflow.core.errors import GroupError
from moeflow.core.units import format_bytes
from moeflow.engine.ranks.joining import Candidacy, Invitation, JoinRequest, hear, say
from moeflow.parallel.tcp.conversation import Refusal
from moeflow.parallel.tcp.link import Link
from moeflow.parallel.tcp.refusal_log import RefusalLog

logger = logging.getLogger(__name__)

_LOOK_S: Final = 0.5  # interval of checks whether a waiting process is gone


@dataclass(frozen=True, slots=True)
class RankCandidate:
    """A process that can be a rank."""

    link: Link
    candidacy: Candidacy


class Reception:
    """Where processes that want to join are looked at. `take_in` is for an `Endpoint`."""

    def __init__(
        self,
        num_wanted: int,
        invitation: Invitation,
        fingerprint: str,
        objection: Callable[[JoinRequest], str],
    ) -> None:
        """`objection` says why a process cannot be a rank; empty: it can."""
        self._num_wanted = num_wanted
        self._invitation = invitation
        self._fingerprint = fingerprint
        self._objection = objection
        self._changed = threading.Condition()
        self._found: list[RankCandidate] = []
        self._has_begun = False
        self._refusals = RefusalLog(logger)  # a refused process may retry
        self._has_ended = False

    def take_in(self, link: Link) -> None:
        """Look at a process; close the link if it cannot be a rank. Blocks: while it answers."""
        try:
            refusal = self._examine(link)
            if refusal is None:
                return
            say(link, refusal)
            reason = refusal.reason
        except GroupError as error:
            reason = str(error)
        link.close()
        self._refusals.note(link.host, f"{link.address} does not join", reason)

    def wait(self, timeout_s: float) -> list[RankCandidate]:
        """Return as many as are wanted, by rank from 1. Raises: GroupError if they do not come in time."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while not self._is_full():
                if time.monotonic() > deadline_s:
                    raise GroupError(
                        f"{len(self._found)} of {self._num_wanted} other ranks joined within {timeout_s:g} s: run "
                        "`moeflow join` on each of their machines, or use fewer (--ranks)"
                    )
                self._changed.wait(_LOOK_S)
            self._has_begun = True
            return list(self._found)

    def close(self) -> None:
        """Refuse waiting and new processes."""
        with self._changed:
            self._has_ended = True
        for candidate in self._found:
            candidate.link.close()

    def _is_full(self) -> bool:
        if not self._has_begun:
            for candidate in [it for it in self._found if it.link.has_ended()]:
                logger.warning("%s has gone again", candidate.link.address)
                candidate.link.close()
                self._found.remove(candidate)
        return len(self._found) == self._num_wanted

    def _no_place(self) -> Refusal | None:
        """Return why there is no place now; None: there is one."""
        if self._has_ended:
            return Refusal("the engine has ended", may_retry=True)
        if self._is_full():
            all_joined = f"all {self._num_wanted} other ranks have joined (--ranks)"
            return Refusal(f"{all_joined}; it may take the place of one later", may_retry=True)
        return None

    def _examine(self, link: Link) -> Refusal | None:
        """Take a process in, or return why not. Raises: GroupError if it goes or reports an error."""
        application = hear(link, JoinRequest)
        if reason := self._objection(application):
            return Refusal(reason)
        with self._changed:
            if refusal := self._no_place():
                return refusal
        say(link, self._invitation)
        candidacy = hear(link, Candidacy)
        if candidacy.fingerprint != self._fingerprint:
            return Refusal(
                "its checkpoint is not that of the first rank (config, tensors or weights differ): copy that one, or "
                "name the right one"
            )
        with self._changed:
            if refusal := self._no_place():
                return refusal
            self._found.append(RankCandidate(link, candidacy))
            self._changed.notify_all()
        free = format_bytes(application.available_bytes)
        logger.warning("%s joins: %d threads, %s of memory free", link.address, application.num_threads, free)
        return None
