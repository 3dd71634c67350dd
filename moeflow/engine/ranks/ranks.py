"""The other ranks of an engine, seen from the first: given each pass, ended; wherever they are.

The first rank has the queue and samples; the others load the same checkpoint and compute the same passes, each its own
part of the model. They wait for a pass while there are no requests; `check` looks meanwhile whether they are
there. What takes place within a pass are collectives, which have a deadline. A rank that is gone ends the engine, which
is then started again as after any death.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from moeflow.core.errors import GroupError
from moeflow.models.pass_input import PassInput
from moeflow.parallel.group import OverlappingGroup


class Ranks(ABC):
    """Ranks 1, 2, ... of an engine; this process is rank 0."""

    group: OverlappingGroup  # of all ranks
    _has_lost = False  # one of them

    @property
    def hosts(self) -> Sequence[str]:
        """Where ranks run, this one first: addresses; empty: on this machine."""
        return [""] * self.group.size

    @abstractmethod
    def wait_until_loaded(self) -> None:
        """Wait for the ranks to load the model. Raises: GroupError if one of them cannot."""

    @abstractmethod
    def close(self) -> None:
        """End the ranks. Blocks: for a moment, some seconds if one of them hangs."""

    @abstractmethod
    def _tell_all(self, message: bytes) -> None:
        """Send a message to each rank. Raises: GroupError if one is gone."""

    @abstractmethod
    def _note_ending(self, error: GroupError) -> None:
        """Add to an error how a rank ended, if known."""

    @abstractmethod
    def _look(self) -> None:
        """Raise a GroupError if a rank is gone. Blocks: not at all."""

    def check(self) -> None:
        """Look whether all ranks are there, while none has anything to compute. Raises: GroupError if one is gone."""
        with self._noting_ending():
            self._look()

    def tell(self, message: msgspec.Struct) -> None:
        """Send a message to all ranks between two passes. Raises: GroupError if one is gone."""
        with self._noting_ending():
            self._tell_all(msgspec.msgpack.encode(message))

    @contextmanager
    def _noting_ending(self) -> Iterator[None]:
        try:
            yield
        except GroupError as error:
            self._has_lost = True
            self._note_ending(error)
            raise

    @contextmanager
    def all_computing(self, given: PassInput) -> Iterator[None]:
        """Have all ranks compute a pass, which this one does in the block.

        Raises: GroupError if one of them is gone, or if this one fails: it is no longer where the others are.
        """
        with self._noting_ending():
            try:
                self._tell_all(msgspec.msgpack.encode(given))
                yield
            except GroupError:
                raise
            except BaseException as error:
                self.group.abort(f"a pass failed with {type(error).__name__}: {error}")
                raise GroupError(f"a pass failed on rank 0 of the engine: {error}") from error
