"""What a rank that joined says while it loads, and until when the first rank waits for it.

Loading takes as long as a disk needs. So a rank reports progress repeatedly; a silent one is stopped or unreachable. It
also checks whether the first rank still exists, so that it does not load in vain.
"""

from __future__ import annotations

import time
from typing import Final

from moeflow.parallel.tcp.link import Link

SIGN_S: Final = 5.0  # between two of a rank's signs
SILENCE_S: Final = 120.0  # after which it is given up
_LOADING: Final = "loading"  # the name of both messages
_GOES_ON, _DONE = b"", b"done"


class LoadingSigns:
    """The signs of a rank that loads."""

    def __init__(self, link: Link) -> None:
        """`link` leads to the first rank."""
        self._link = link
        self._next_s = 0.0

    def note_progress(self, bytes_done: int, bytes_total: int) -> None:
        """Give a sign if it is time for one; a `progress` of `load_model`. Raises: GroupError if the first rank is
        gone."""
        self._link.check_idle()
        if time.monotonic() >= self._next_s:
            self._link.send_message(_LOADING, _GOES_ON)
            self._next_s = time.monotonic() + SIGN_S

    def end(self) -> None:
        """Report that the model is loaded."""
        self._link.send_message(_LOADING, _DONE)


def wait_until_loaded(link: Link) -> None:
    """Wait for a rank to load. Raises: GroupError if it cannot, or gives no sign for long."""
    while link.receive_message(_LOADING, SILENCE_S) != _DONE:
        pass
