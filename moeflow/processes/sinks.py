"""Receivers of an engine's outputs: a sink for each request, and none for cancelled ones.

An abandoned request may be submitted again under the same id. Each submission has exactly one last output, and an
engine answers in order. So outputs up to that one belong to the earlier submission. Knows no process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from moeflow.core.engine_messages import TokenOutput

Sink = Callable[[TokenOutput | None], None]  # None: the engine ended before the request did


class Sinks:
    """The sinks of one engine's requests."""

    def __init__(self) -> None:
        self._sinks: dict[str, Sink] = {}
        self._abandoned: Counter[str] = Counter()  # submissions whose last output is still to come

    @property
    def is_waiting(self) -> bool:
        """Whether any output is still to come, wanted or not."""
        return bool(self._sinks or self._abandoned)

    def add(self, request_id: str, sink: Sink) -> None:
        """A request is submitted."""
        self._sinks[request_id] = sink

    def abandon(self, request_id: str) -> bool:
        """Drop the rest of this request; return whether it was running."""
        is_known = self._sinks.pop(request_id, None) is not None
        if is_known:
            self._abandoned[request_id] += 1
        return is_known

    def hand_out(self, output: TokenOutput) -> None:
        """Give an output to whom it belongs."""
        request_id, is_last = output.request_id, output.finish_reason is not None
        if request_id in self._abandoned:
            if is_last:
                self._note_last(request_id)
            return
        sink = self._sinks.get(request_id)
        if sink is not None:
            if is_last:
                del self._sinks[request_id]
            sink(output)

    def end(self) -> None:
        """The engine has ended: tell all that still wait."""
        sinks, self._sinks = self._sinks, {}
        self._abandoned.clear()
        for sink in sinks.values():
            sink(None)

    def _note_last(self, request_id: str) -> None:
        """An abandoned submission has ended."""
        self._abandoned[request_id] -= 1
        if not self._abandoned[request_id]:
            del self._abandoned[request_id]
