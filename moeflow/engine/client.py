"""The one small protocol through which servers, shells and clusters use an engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from moeflow.engine.messages import EngineStats, ModelInfo, Submission, TokenOutput


class EngineClient(Protocol):
    """An engine, seen from an asyncio program. The engine may live in this process or another."""

    @property
    def model(self) -> ModelInfo:
        """What the engine serves; valid once the client is started."""
        ...

    @property
    def is_alive(self) -> bool:
        """Whether requests have a chance: the engine process runs and has not reported failure."""
        ...

    def stream(self, submission: Submission) -> AsyncGenerator[TokenOutput, None]:
        """Submit and yield outputs as passes bring them; the last one has a `finish_reason`.

        Closing the iterator early (or cancelling the task that reads it) cancels the request in the engine.

        Raises: EngineError if the engine is gone.
        """
        ...

    def cancel(self, request_ids: list[str]) -> None:
        """Ask the engine to end these; their streams then finish with FinishReason.CANCELLED."""
        ...

    def stats(self) -> EngineStats:
        """Return the newest snapshot the engine has sent; never waits."""
        ...

    async def shutdown(self, deadline_s: float) -> None:
        """Let running requests finish within the deadline, cancel the rest, end the engine."""
        ...
