"""Measured costs of work here and at lenders, and the choice of experts that go to lenders.

A lender computes its part while this process computes its own and reads absent experts. So the longer part decides the
time of a layer. Experts go to lenders only while that shortens it; never, if the disk is faster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from moeflow.core.running_fit import RunningFit

_MEMORY_BYTES_PER_S: Final = 10e9  # assumed before the first measurement, as the two below
_FLOPS: Final = 20e9
_DISK_BYTES_PER_S: Final = 1e9
_RETRY: Final = 128  # refused decisions before a trial with one expert, since measurements become outdated
_KEEP: Final = 0.9
_MEMORY: Final = 32.0  # observations


@dataclass(frozen=True, slots=True)
class ExpertSize:
    """The sizes of an expert that costs depend on."""

    num_bytes: int
    hidden: int
    width: int

    def computing(self) -> RunningFit:
        """Return the assumed cost of computation, by experts and pairs."""
        return RunningFit([self.num_bytes / _MEMORY_BYTES_PER_S, 6 * self.hidden * self.width / _FLOPS], _MEMORY)

    def from_disk(self) -> RunningFit:
        """Return the assumed cost of experts from disk, by experts and pairs."""
        return RunningFit([self.num_bytes / _DISK_BYTES_PER_S, 6 * self.hidden * self.width / _FLOPS], _MEMORY)


class LenderCost:
    """The cost of work at a lender."""

    def __init__(self, size: ExpertSize, round_trip_s: float, bytes_per_s: float) -> None:
        self._size = size
        self.link = RunningFit([round_trip_s, 1 / bytes_per_s], _MEMORY)  # messages, bytes both ways
        self.computing = size.computing()
        self._waited_s = 0.0  # waits for other heads' work

    def seconds(self, num_experts: int, num_pairs: int, num_rows: int) -> float:
        """Return the seconds of work, transfers included."""
        num_bytes = 4 * self._size.hidden * (num_rows + num_pairs)
        return self.link.seconds(1, num_bytes) + self.computing.seconds(num_experts, num_pairs) + self._waited_s

    def observe(
        self, num_experts: int, num_pairs: int, num_bytes: int, *, elapsed_s: float, waited_s: float, computed_s: float
    ) -> None:
        """Receive the measured times of one message of work."""
        self.computing.observe(computed_s, num_experts, num_pairs)
        self.link.observe(elapsed_s - waited_s - computed_s, 1, num_bytes)
        self._waited_s = _KEEP * self._waited_s + (1 - _KEEP) * waited_s


@dataclass(frozen=True, slots=True)
class Candidate:
    """An expert that is absent here and that a lender has."""

    expert: int
    lender: int
    num_pairs: int


@dataclass(slots=True)
class _CostPart:
    num_experts: int = 0
    num_pairs: int = 0

    def add(self, num_pairs: int, sign: int = 1) -> None:
        self.num_experts += sign
        self.num_pairs += sign * num_pairs


class Split:
    """Decides for each layer which experts go to lenders."""

    def __init__(self, size: ExpertSize) -> None:
        self.resident = size.computing()  # cost of computation with resident experts, by experts and pairs
        self.disk = size.from_disk()  # ... and with experts from disk
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
        """Return the candidates that go to their lenders; this process reads the others from disk.

        `here` and `on_disk` are the experts and pairs in memory, and those to read in any case.
        """
        ordered = sorted(candidates, key=lambda it: it.num_pairs)  # fewest transferred rows for each saved read first
        resident_s = self.resident.seconds(*here)
        reads = _CostPart(*on_disk)
        for it in ordered:
            reads.add(it.num_pairs)
        parts: dict[int, _CostPart] = {}
        best, num_best = resident_s + self.disk.seconds(reads.num_experts, reads.num_pairs), 0
        for number, it in enumerate(ordered, 1):
            reads.add(it.num_pairs, -1)
            parts.setdefault(it.lender, _CostPart()).add(it.num_pairs)
            away_s = max(
                costs[lender].seconds(part.num_experts, part.num_pairs, min(part.num_pairs, num_tokens))
                for lender, part in parts.items()
            )
            seconds = max(resident_s + self.disk.seconds(reads.num_experts, reads.num_pairs), away_s)
            if seconds < best:
                best, num_best = seconds, number
        return ordered[: num_best or self._retried(len(ordered))]

    def _retried(self, num_candidates: int) -> int:
        """Return 1 if it is time to try a candidate again after many refusals."""
        self._num_declined += num_candidates > 0
        if self._num_declined < _RETRY:
            return 0
        self._num_declined = 0
        return min(num_candidates, 1)
