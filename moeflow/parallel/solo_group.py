"""A group of one: every collective gives back what it was given."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moeflow.core.errors import GroupError


class SoloGroup:
    """The `Group` of a process that computes alone."""

    rank = 0
    size = 1

    def __init__(self) -> None:
        self._abort_reason: str | None = None

    def all_gather(self, name: str, tensor: Tensor) -> list[Tensor]:
        """Return the tensor."""
        self._check(name)
        return [tensor]

    def all_to_all(self, name: str, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return the one part."""
        self._check(name)
        assert len(parts) == 1, "each rank has one part"
        return list(parts)

    def broadcast_bytes(self, name: str, data: bytes | None) -> bytes:
        """Return the data."""
        self._check(name)
        assert data is not None, "rank 0 has the data"
        return data

    def barrier(self, name: str) -> None:
        """Return."""
        self._check(name)

    def abort(self, reason: str) -> None:
        """Let everything from now on raise."""
        self._abort_reason = self._abort_reason or reason

    def close(self) -> None:
        """Do nothing: there is no memory."""

    def _check(self, name: str) -> None:
        if self._abort_reason is not None:
            raise GroupError(f"the group had ended before {name!r}: {self._abort_reason}")
