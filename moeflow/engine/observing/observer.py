"""Observes the passes of an engine while somebody looks: from a question until `LEASE_S` after the last one."""

from __future__ import annotations

from collections.abc import Callable

from moeflow.core.observation import LEASE_S, Question, Sight, Watching


class Observer:
    """What one engine has seen since somebody began to look."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` gives seconds and never goes back."""
        self._clock = clock
        self._since_s = clock()
        self._until_s = self._since_s

    @property
    def is_over(self) -> bool:
        """Whether nobody has looked for so long that it is to be closed."""
        return self._clock() > self._until_s

    def answer(self, question: Question) -> Sight:
        """Answer a question, and observe for the next `LEASE_S`."""
        now_s = self._clock()
        self._until_s = now_s + LEASE_S
        return Watching(now_s - self._since_s)

    def close(self) -> None:
        """Observe no more, and give back what that takes."""
