"""The link to one lender: connects, reconnects, and places experts one by one in the background.

Its own thread does everything that may block. It uses at most half of the link's time, in short pieces, so that work
fits in between. Each second it sends a sign of life. A lender without a timely answer is lost at once: the waiting
pass reads from disk instead. The thread then tries to connect at growing intervals.
"""

from __future__ import annotations

import logging
import mmap
import threading
from contextlib import closing
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from moeflow.checkpoint.packed.file_io import whole_pages
from moeflow.core.address import format_address
from moeflow.core.errors import GroupError, MoeflowError, StorageError
from moeflow.experts.remote.borrowing import Borrowed
from moeflow.experts.remote.lender_costs import ExpertSize, LenderCost
from moeflow.experts.remote.worth import LendingMove
from moeflow.parallel.remote.lending import Borrowing
from moeflow.parallel.remote.work_client import WorkClient

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S: Final = 0.5
_MAX_PAUSE_S: Final = 8.0  # between tries; each pause doubles
_SAY_HERE_S: Final = 1.0
_LIKE: Final = 2.0  # factor between two measurements of the same link

Address = tuple[str, int]


class Placing(Protocol):
    """Decides which experts lenders get, and reads them."""

    def next_move(self, held: NDArray[np.bool_], num_slots: int) -> LendingMove | None:
        """Return the next expert for a lender that has `held`; None: none now."""

    def read(self, number: int, into: memoryview) -> None:
        """Read an expert. Raises: StorageError."""

    def has_changed(self) -> None:
        """Handle a change of the experts that lenders have."""

    def has_new_speed(self) -> None:
        """Handle a change of speed: a lender has connected at another speed, or is filled for the first time then."""


@dataclass(slots=True)
class LenderCounters:
    """Counters of a lender's work for this process, which only grow."""

    num_pairs: int = 0
    num_bytes: int = 0  # of rows and results
    waited_s: float = 0.0  # of idle passes


class RemoteLender:
    """A lender. Passes read `client` and `has`, which may change between two layers."""

    def __init__(
        self, address: Address, token: bytes, borrowing: Borrowing, size: ExpertSize, placing: Placing
    ) -> None:
        """Begin to connect."""
        self.where = format_address(*address)
        self.client: WorkClient | None = None  # None: not connected
        self.has = np.zeros(borrowing.num_layers * borrowing.num_experts, bool)
        self.cost = LenderCost(size, 1e-3, 1e8)
        self.num_slots = 0
        self.counters = LenderCounters()
        self._address, self._token, self._borrowing, self._size = address, token, borrowing, size
        self._placing = placing
        self._num_connections = 0
        self._speed = (0.0, 0.0, 0.0)  # of the link, and the number of slots, when `has_new_speed` was last called
        self._is_filling = True  # since then
        self._logged = ""  # the last failure in the log
        self._state = "connecting"
        self._has_ended = threading.Event()
        self._has_lost = threading.Event()
        self._unreadable: set[int] = set()
        self._thread = threading.Thread(target=self._run, name=f"lender {self.where}", daemon=True)
        self._thread.start()

    @property
    def state(self) -> str:
        """The state of the link, in a few words."""
        return self._state

    def lose(self) -> None:
        """Stop using the failed connection; the thread tries another one soon."""
        self._lose(self._num_connections)

    def close(self) -> None:
        """End the thread. Blocks: for a piece of an expert, or while it connects."""
        self._has_ended.set()
        self._has_lost.set()
        self._thread.join()

    def _lose(self, number: int) -> None:
        """Lose a connection, unless a newer one exists."""
        if number == self._num_connections:
            self._forget()
            self._has_lost.set()

    def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._has_ended.is_set():
            self._has_lost.clear()
            try:
                with closing(Borrowed(self._address, self._token, self._borrowing)) as borrowed:
                    self._begin(borrowed)
                    pause_s = _FIRST_PAUSE_S
                    self._serve(borrowed)
            except (MoeflowError, OSError) as error:
                self._note_failure(error)
            finally:
                self._forget()
            self._has_ended.wait(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    def _begin(self, borrowed: Borrowed) -> None:
        rates = borrowed.measure()
        self.cost = LenderCost(self._size, rates.round_trip_s, rates.bytes_per_s)
        self.num_slots = borrowed.num_slots
        self._num_connections += 1
        number = self._num_connections
        self.client = borrowed.client(on_end=lambda _: self._lose(number))
        self._state, self._logged = "connected", ""
        speed = (rates.round_trip_s, rates.bytes_per_s, float(self.num_slots))
        if not all(_are_like(*pair) for pair in zip(speed, self._speed, strict=True)):
            self._speed, self._is_filling = speed, True
            self._placing.has_new_speed()
        logger.warning(
            "%s lends memory for %d experts (round trip %.2g ms, %.2g MB/s)",
            self.where,
            self.num_slots,
            rates.round_trip_s * 1e3,
            rates.bytes_per_s / 1e6,
        )

    def _serve(self, borrowed: Borrowed) -> None:
        """Place experts as long as some deserve it. Raises: GroupError when the lender is lost."""
        content = memoryview(mmap.mmap(-1, whole_pages(self._size.num_bytes)))
        while not self._has_lost.is_set():
            move = self._placing.next_move(self.has, self.num_slots)
            if move is None or move.place in self._unreadable:
                if self._is_filling:
                    self._is_filling = False
                    self._placing.has_new_speed()
                borrowed.say_here()
                self._has_lost.wait(_SAY_HERE_S)
            else:
                self._place(borrowed, move, content)
        raise GroupError(f"the link to {self.where} failed")

    def _place(self, borrowed: Borrowed, move: LendingMove, content: memoryview) -> None:
        try:
            self._placing.read(move.place, content)
        except StorageError as error:  # a pass that needs it reports it
            self._unreadable.add(move.place)
            logger.debug("%s", error)
            return
        if move.drop is not None:
            self.has[move.drop] = False
            self._placing.has_changed()
            borrowed.drop(move.drop)
        borrowed.send_expert(move.place, content[: self._size.num_bytes], self._pause)
        self.has[move.place] = True
        self._placing.has_changed()

    def _pause(self, seconds: float) -> None:
        """Leave the link to work for as long as it was used. Raises: GroupError if the lender is lost."""
        if self._has_lost.wait(seconds):
            raise GroupError(f"the link to {self.where} failed")

    def _forget(self) -> None:
        """Forget the lender's experts."""
        client, self.client = self.client, None
        self.has[:] = False
        self._placing.has_changed()
        if client is not None:
            self._state = "lost"
            client.end("the lender was lost")

    def _note_failure(self, error: MoeflowError | OSError) -> None:
        """Log the reason of a failed connection, once for each reason."""
        self._state = f"not connected: {error}"
        if not self._has_ended.is_set() and str(error) != self._logged:
            logger.warning("experts at %s are read from disk: %s; retrying", self.where, error)
            self._logged = str(error)


def _are_like(one: float, other: float) -> bool:
    return max(one, other) < _LIKE * min(one, other)
