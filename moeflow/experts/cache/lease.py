"""A pass's hold on the experts that its tokens chose: until it ends, these experts keep their slots."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Protocol

from moeflow.experts.cache.expert_states import ExpertState
from moeflow.experts.cache.load_job import LoadJob


class Lessor(Protocol):
    """What gives leases: the expert cache."""

    def wait_for_any(self, jobs: Sequence[LoadJob]) -> None:
        """Wait until one of the loads is done, well or badly."""

    def release(self, held: Sequence[ExpertState]) -> None:
        """End a lease on these experts."""


class Lease:
    """Experts of one layer, held until `release` or the end of a `with` block."""

    def __init__(
        self, lessor: Lessor, held: Sequence[ExpertState], slots: Mapping[int, int], pending: Mapping[int, LoadJob]
    ) -> None:
        self.slots = slots  # of each expert, by its number in the layer
        self._lessor = lessor
        self._held = held
        self._pending = pending  # those that were not resident, likewise

    @property
    def hits(self) -> list[int]:
        """The experts that can be computed on at once."""
        return [expert for expert in self.slots if expert not in self._pending]

    @property
    def is_complete(self) -> bool:
        """Whether there is nothing left to wait for."""
        return all(job.is_done for job in self._pending.values())

    def arriving(self) -> Iterator[list[int]]:
        """Yield the other experts as they arrive, several at once if they do.

        Blocks: until the next arrives. Raises: StorageError if one of them cannot be loaded.
        """
        pending = dict(self._pending)
        while pending:
            self._lessor.wait_for_any(list(pending.values()))
            arrived = [expert for expert, job in pending.items() if job.is_done]
            for expert in arrived:
                error = pending.pop(expert).error
                if error is not None:
                    raise error
            yield arrived

    def wait(self) -> None:
        """Wait until all are there. Raises: StorageError if one of them cannot be loaded."""
        for _ in self.arriving():
            pass

    def release(self) -> None:
        """End the lease; a second call does nothing."""
        held, self._held = self._held, ()
        self._lessor.release(held)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
