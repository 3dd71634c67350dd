"""A lease on experts of a layer: until it ends, these experts keep their slots."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType

from moeflow.experts.cache.expert_states import ExpertState
from moeflow.experts.cache.load_job import LoadJob


class Lease:
    """Experts of one layer, held until `release` or the end of a `with` block."""

    def __init__(
        self,
        held: Sequence[ExpertState],
        slots: Mapping[int, int],
        pending: Mapping[int, LoadJob],
        *,
        wait_for_any: Callable[[Sequence[LoadJob]], None],
        on_release: Callable[[Sequence[ExpertState]], None],
    ) -> None:
        """`slots` and `pending` are by the experts' numbers in the layer; `pending` are the loads of absent ones."""
        self.slots = slots
        self._wait_for_any, self._on_release = wait_for_any, on_release
        self._held = held
        self._pending = pending

    @property
    def hits(self) -> list[int]:
        """The experts that were resident."""
        return [expert for expert in self.slots if expert not in self._pending]

    @property
    def is_complete(self) -> bool:
        """Whether all experts are resident."""
        return all(job.is_done for job in self._pending.values())

    def arriving(self) -> Iterator[list[int]]:
        """Yield the other experts as they arrive, one or several at a time.

        Blocks: until the next arrives. Raises: StorageError if one of them cannot be loaded.
        """
        pending = dict(self._pending)
        while pending:
            self._wait_for_any(list(pending.values()))
            arrived = [expert for expert, job in pending.items() if job.is_done]
            for expert in arrived:
                error = pending.pop(expert).error
                if error is not None:
                    raise error
            yield arrived

    def wait(self) -> None:
        """Wait until all are resident. Raises: StorageError if one of them cannot be loaded."""
        for _ in self.arriving():
            pass

    def release(self) -> None:
        """End the lease; a second call does nothing."""
        held, self._held = self._held, ()
        self._on_release(held)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
