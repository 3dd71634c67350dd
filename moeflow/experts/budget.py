"""One memory budget: experts have as many slots as everything else leaves them.

Before a pass touches new memory, experts give slots back; when that memory is free again, the slots return. KV cache,
work space and experts thus share the limit. Their sum stays within it if each pass takes at most the memory that it
announced. Knows no tensors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from moeflow.core.errors import CapacityError
from moeflow.core.units import format_bytes
from moeflow.experts.elastic_slots import ElasticSlots

CALM_PASSES: Final = 16  # in a row with enough memory for more slots, before slots return


class MemoryLimit:
    """Keeps one or several processes within a limit."""

    def __init__(self, limit_bytes: int, slots: ElasticSlots, measure: Callable[[], int], *, min_slots: int) -> None:
        """`measure` returns the bytes in use, slots included; `min_slots` always remain."""
        self.limit_bytes = limit_bytes
        self.other_bytes = 0  # in use besides slots, at the last measurement
        self._slots = slots
        self._measure = measure
        self._min_slots = min_slots
        self._rooms: deque[int] = deque(maxlen=CALM_PASSES)  # the number of slots that fit in each of the last passes

    def make_room(self, growth_bytes: int) -> None:
        """Reduce or restore the slots, so that a pass can touch `growth_bytes` of other memory.

        Raises: CapacityError if they do not fit.
        """
        room = self._room_beside(growth_bytes)
        is_first = not self._rooms
        self._rooms.append(room)
        wanted = max(min(self._rooms), self._min_slots)
        have = self._slots.num_slots
        if wanted < have or (wanted > have and (is_first or len(self._rooms) == CALM_PASSES)):
            have = self._slots.resize(wanted)
        self._check(have, room, growth_bytes)

    def make_room_between_passes(self, growth_bytes: int) -> None:
        """Reduce the slots for memory that is used outside of passes. Slots never return here.

        Raises: CapacityError if the memory does not fit.
        """
        room = self._room_beside(growth_bytes)
        have = self._slots.num_slots
        if room < have:
            have = self._slots.resize(max(room, self._min_slots))
        self._check(have, room, growth_bytes)

    def _room_beside(self, growth_bytes: int) -> int:
        """Measure, and return the number of slots that fit."""
        self.other_bytes = self._measure() - self._slots.taken_bytes
        return self._slots.within(self.limit_bytes - self.other_bytes - growth_bytes)

    def _check(self, have: int, room: int, growth_bytes: int) -> None:
        if have > room:
            raise CapacityError(
                f"the memory limit of {format_bytes(self.limit_bytes)} is reached: {format_bytes(self.other_bytes)} "
                f"are used besides experts, {format_bytes(growth_bytes)} more are needed, and {have} experts "
                "must stay. Raise the limit (--memory), or lower --max-num-seqs, --max-model-len or --kv-cache"
            )
