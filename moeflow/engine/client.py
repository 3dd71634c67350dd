"""The one small protocol through which servers, shells and clusters use an engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from moeflow.core.engine_messages import EngineStats, ModelInfo, Submission, TokenOutput

if TYPE_CHECKING:
    from moeflow.core.observation import Question, Sight


class EngineState(StrEnum):
    """What a request would meet now."""

    READY = "ready"
    RESTARTING = "restarting"  # it has died; another one starts, and continues all requests
    STALLED = "stalled"  # it does not answer, and may again
    DRAINING = "draining"  # its machine is about to go: it gets no new requests
    GONE = "gone"  # for good


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """One of the engines that compute the same model side by side."""

    state: EngineState
    stats: EngineStats  # of it alone
    is_slow: bool = False  # it answers, but so late that it gets no new requests
    host: str = ""  # name of its machine; empty: the server's
    activity: str = ""  # progress of its start; empty: none is known


class EngineClient(Protocol):
    """An engine, seen from an asyncio program. The engine may live in this process or another."""

    @property
    def model(self) -> ModelInfo:
        """What the engine serves; valid once the client is started."""

    @property
    def state(self) -> EngineState:
        """Whether requests are computed now."""

    @property
    def back_in_s(self) -> float:
        """Seconds until an engine that is restarting will probably be ready; 0 in any other state."""

    def stream(self, submission: Submission) -> AsyncGenerator[TokenOutput, None]:
        """Submit and yield outputs as passes bring them; the last one has a `finish_reason`.

        Closing the iterator early (or cancelling the task that reads it) cancels the request in the engine.

        Raises: EngineError if the engine is gone.
        """

    def stats(self) -> EngineStats:
        """Return the newest snapshot the engine has sent; never waits."""

    def replicas(self) -> list[ReplicaStatus]:
        """Return how each of the engines is that stand behind this client, always in the same order."""

    async def look(self, question: Question) -> dict[int, Sight]:
        """Return the answers of the engines by their places in `replicas()`, after two seconds at most.

        Engines that load, do not answer or cannot answer are left out. Each engine that gets the question observes its
        passes for the next `LEASE_S` of core/observation.py.
        """

    async def shutdown(self, deadline_s: float) -> None:
        """Let running requests finish within the deadline, cancel the rest, end the engine."""
