"""The interface of a store that has keys and values of prefixes outside of KV blocks. No method waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from moeflow.core.request import Request


class PrefixRead(Protocol):
    """Blocks that are being filled."""

    @property
    def is_over(self) -> bool:
        """Whether nothing is written into the blocks any more."""

    @property
    def is_late(self) -> bool:
        """Whether it takes so long that no request should wait for it."""

    def cancel(self) -> None:
        """Cancel reads that have not begun."""

    @property
    def num_filled(self) -> int:
        """How many of the blocks, the first ones, have their contents, once it is over."""

    @property
    def has_state(self) -> bool:
        """Whether the slot has the state behind the last of the blocks, if one was asked for, once it is over."""


class PrefixSource(Protocol):
    """Finds and reads beginnings of requests."""

    def expect(self, request: Request) -> None:
        """Look for the tokens of a request that will be asked for."""

    def num_found(self, request: Request) -> int | None:
        """Return how many whole blocks of its first tokens, fewer than all, could be read; None: not known yet.

        With recurrent layers the state behind the last of them could be read, too.
        """

    def read(self, request: Request, start: int, block_ids: Sequence[int], state_slot: int) -> PrefixRead | None:
        """Begin to fill blocks with the prefix found for a request, from block `start` on; None: there is no memory
        now.

        With recurrent layers the state behind all that was found goes into `state_slot`.
        """

    def forget(self, request: Request) -> None:
        """Nothing more is asked for a request."""
