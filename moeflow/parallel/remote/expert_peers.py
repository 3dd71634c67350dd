"""The other replicas of an engine that compute some of its experts: found in a folder, connected, and again when lost.

Each replica listens at a local port that it writes into the folder. It serves clients with the folder's token, and
keeps a link to each other replica's service. A missing replica delays no other.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from moeflow.core.errors import ConfigError, GroupError
from moeflow.parallel.remote.expert_service import ExpertOwner, ExpertService, ServedClient
from moeflow.parallel.remote.expert_work import ExpertWork, Status, WorkResult
from moeflow.parallel.remote.work_client import PendingWork, WorkClient
from moeflow.parallel.tcp.cluster_token import ensure_token
from moeflow.parallel.tcp.endpoint import Endpoint, connect
from moeflow.parallel.tcp.link import Link

logger = logging.getLogger(__name__)

LOOPBACK: Final = "127.0.0.1"
RETRY_S: Final = 0.2  # between two attempts to connect
PATIENCE_S: Final = 5.0  # for a result at first; who was waited for in vain gets twice as long, ...
MAX_PATIENCE_S: Final = 60.0  # ... up to this


@dataclass(frozen=True, slots=True)
class MeetingPlace:
    """A folder that only the replicas' user may enter."""

    folder: Path

    def token(self) -> bytes:
        """Return the secret that authenticates replicas. Raises: ConfigError."""
        return ensure_token(self.folder / "token")

    def announce(self, replica: int, port: int) -> None:
        """Let the others know where a replica listens. Raises: OSError."""
        draft = self.folder / f"replica-{replica}.new"
        draft.write_text(f"{port}\n")
        os.replace(draft, self._file_of(replica))

    def port_of(self, replica: int) -> int | None:
        """Return where a replica listens, or did last; None: it has not said so."""
        with suppress(OSError, ValueError):
            return int(self._file_of(replica).read_text())
        return None

    def _file_of(self, replica: int) -> Path:
        return self.folder / f"replica-{replica}"


class Peer:
    """Another replica, as a thread that connects to it whenever it is not connected."""

    def __init__(self, replica: int, place: MeetingPlace, owner: ExpertOwner) -> None:
        """Begin to look for it; `owner` describes the experts."""
        self.replica = replica
        self._place, self._owner = place, owner
        self._patience_s = PATIENCE_S
        self._client: WorkClient | None = None
        self._is_gone, self._is_closed = threading.Event(), threading.Event()
        threading.Thread(target=self._run, name=f"replica {replica}", daemon=True).start()

    @property
    def is_connected(self) -> bool:
        """Whether work can be submitted."""
        return self._client is not None

    def submit(self, work: ExpertWork) -> PendingWork | None:
        """Have it compute; None: it is not there."""
        client = self._client
        return None if client is None else client.submit(work)

    def result(self, pending: PendingWork) -> WorkResult | None:
        """Return what became of work; None: it is gone, or does not answer. Blocks: as long as it may take."""
        try:
            result = pending.result(self._patience_s)
        except GroupError:
            if time.perf_counter() - pending.submitted_s >= self._patience_s:
                self._patience_s = min(2 * self._patience_s, MAX_PATIENCE_S)
            return None
        return result if result.status is Status.DONE else None

    def close(self) -> None:
        """End the link, and look for it no more."""
        self._is_closed.set()
        self._is_gone.set()

    def _run(self) -> None:
        while not self._is_closed.is_set():
            link = self._connect()
            if link is None:
                self._is_closed.wait(RETRY_S)
                continue
            self._is_gone.clear()
            client = WorkClient(link, self._owner.hidden, self._owner.num_experts, self._note_end)
            self._client = client
            if not self._is_closed.is_set():  # `close` may have come before the flag was cleared
                self._is_gone.wait()
            self._client = None
            client.close()
            link.endpoint.close()

    def _connect(self) -> Link | None:
        port = self._place.port_of(self.replica)
        if port is None:
            return None
        try:
            return connect(LOOPBACK, port, self._place.token())
        except (GroupError, ConfigError):  # it is not there any more, or yet
            return None

    def _note_end(self, error: GroupError) -> None:
        if not self._is_closed.is_set():
            logger.warning(
                "replica %d is lost: its experts are computed here until it is back (%s)", self.replica, error
            )
        self._is_gone.set()


class ExpertPeers:
    """All other replicas, and this one's service for them."""

    def __init__(
        self, replica: int, num_replicas: int, place: MeetingPlace, owner: ExpertOwner, service: ExpertService
    ) -> None:
        """Begin: be there for the others, and look for them. Raises: ConfigError, OSError."""
        self._owner, self._service = owner, service
        self._lock = threading.Lock()
        self._served: dict[Link, ServedClient] = {}
        self._endpoint = Endpoint(place.token())
        place.announce(replica, self._endpoint.listen(LOOPBACK, 0, self._serve))
        others = (number for number in range(num_replicas) if number != replica)
        self.peers: Sequence[Peer] = [Peer(number, place, owner) for number in others]

    def close(self) -> None:
        """End all links."""
        for peer in self.peers:
            peer.close()
        with self._lock:
            served = list(self._served.values())
        for client in served:
            client.close("the replica ends")
        self._endpoint.close()

    def _serve(self, link: Link) -> None:
        with self._lock:
            self._served[link] = self._service.serve(link, self._owner, lambda _: self._forget(link))

    def _forget(self, link: Link) -> None:
        with self._lock:
            del self._served[link]
