"""What work takes here and at lenders, as far as it was seen, and how much of it goes there so that all is ready first.

A lender's part is computed while this process computes its own and reads what it lacks. So the time of a layer is that
of the longer part, and experts go to lenders only as far as that makes it shorter: never, if the disk is faster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from moeflow.core.running_fit import RunningFit

_MEMORY_BYTES_PER_S: Final = 10e9  # assumed until something was computed, likewise those below
_FLOPS: Final = 20e9
_DISK_BYTES_PER_S: Final = 1e9
_RETRY: Final = 128  # decisions against a place, after which it is tried with one expert: what was seen grows old
_KEEP: Final = 0.9
_MEMORY: Final = 32.0  # observations


@dataclass(frozen=True, slots=True)
class ExpertSize:
    """What an expert is to a cost."""

    num_bytes: int
    hidden: int
    width: int

    def computing(self) -> RunningFit:
        """Return what computing is assumed to take: experts, pairs."""
        return RunningFit([self.num_bytes / _MEMORY_BYTES_PER_S, 6 * self.hidden * self.width / _FLOPS], _MEMORY)

    def from_disk(self) -> RunningFit:
        """Return what experts from disk are assumed to take: experts, pairs."""
        return RunningFit([self.num_bytes / _DISK_BYTES_PER_S, 6 * self.hidden * self.width / _FLOPS], _MEMORY)


class LenderCost:
    """What work takes at a lender."""

    def __init__(self, size: ExpertSize, round_trip_s: float, bytes_per_s: float) -> None:
        self._size = size
        self.link = RunningFit([round_trip_s, 1 / bytes_per_s], _MEMORY)  # messages, bytes both ways
        self.computing = size.computing()
        self._waited_s = 0.0  # for other heads' work

    def seconds(self, num_experts: int, num_pairs: int, num_rows: int) -> float:
        """Return how long work takes from here and back."""
        num_bytes = 4 * self._size.hidden * (num_rows + num_pairs)
        return self.link.seconds(1, num_bytes) + self.computing.seconds(num_experts, num_pairs) + self._waited_s

    def observe(
        self, num_experts: int, num_pairs: int, num_bytes: int, *, elapsed_s: float, waited_s: float, computed_s: float
    ) -> None:
        """Receive what one message of work took."""
        self.computing.observe(computed_s, num_experts, num_pairs)
        self.link.observe(elapsed_s - waited_s - computed_s, 1, num_bytes)
        self._waited_s = _KEEP * self._waited_s + (1 - _KEEP) * waited_s


@dataclass(frozen=True, slots=True)
class Candidate:
    """An expert that is not in memory here and that a lender has."""

    expert: int
    lender: int
    num_pairs: int


@dataclass(slots=True)
class _Part:
    num_experts: int = 0
    num_pairs: int = 0

    def add(self, num_pairs: int, sign: int = 1) -> None:
        self.num_experts += sign
        self.num_pairs += sign * num_pairs


class Split:
    """Decides layer by layer."""

    def __init__(self, size: ExpertSize) -> None:
        self.resident = size.computing()  # what computing with experts in memory here takes: experts, pairs
        self.disk = size.from_disk()  # ... and with those that are read first
        self._num_declined = 0

    def choose(
        self,
        candidates: Sequence[Candidate],
        costs: Mapping[int, LenderCost],
        *,
        here: tuple[int, int],
        on_disk: tuple[int, int],
        num_tokens: int,
    ) -> list[Candidate]:
        """Return the candidates that go to their lenders; the others are read from disk.

        `here` and `on_disk` are experts and pairs in memory, and that must be read anyway.
        """
        ordered = sorted(candidates, key=lambda it: it.num_pairs)  # few rows travel for each read that is saved
        resident_s = self.resident.seconds(*here)
        reads = _Part(*on_disk)
        for it in ordered:
            reads.add(it.num_pairs)
        parts: dict[int, _Part] = {}
        best, num_best = resident_s + self.disk.seconds(reads.num_experts, reads.num_pairs), 0
        for number, it in enumerate(ordered, 1):
            reads.add(it.num_pairs, -1)
            parts.setdefault(it.lender, _Part()).add(it.num_pairs)
            away_s = max(
                costs[lender].seconds(part.num_experts, part.num_pairs, min(part.num_pairs, num_tokens))
                for lender, part in parts.items()
            )
            seconds = max(resident_s + self.disk.seconds(reads.num_experts, reads.num_pairs), away_s)
            if seconds < best:
                best, num_best = seconds, number
        return ordered[: num_best or self._retried(len(ordered))]

    def _retried(self, num_candidates: int) -> int:
        """Return 1 if what was declined again and again is to be tried."""
        self._num_declined += num_candidates > 0
        if self._num_declined < _RETRY:
            return 0
        self._num_declined = 0
        return min(num_candidates, 1)
