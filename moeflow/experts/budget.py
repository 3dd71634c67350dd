"""One budget for everything: experts have as many slots as all else leaves them.

What is held is measured, what comes next is announced: before a pass touches fresh memory, slots are given back for it;
when it is free again, the slots come back. So keys and values, work space and experts share what there is, and the
sum stays within the limit as long as a pass takes no more than it announced. Knows no tensors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from moeflow.core.errors import CapacityError
from moeflow.core.units import format_bytes
from moeflow.experts.elastic_slots import ElasticSlots

CALM_PASSES: Final = 16  # slots come back once there has been room for them so many passes in a row


class MemoryBudget:
    """Keeps a process, or several, within a limit."""

    def __init__(self, limit_bytes: int, slots: ElasticSlots, measure: Callable[[], int], *, min_slots: int) -> None:
        """`measure` returns the bytes that are held now, by slots too; `min_slots` are never given away."""
        self.limit_bytes = limit_bytes
        self.other_bytes = 0  # held beside slots, when that was last measured
        self._slots = slots
        self._measure = measure
        self._min_slots = min_slots
        self._rooms: deque[int] = deque(maxlen=CALM_PASSES)  # how many slots there was room for in the last passes

    def make_room(self, growth_bytes: int) -> None:
        """Reduce the slots so that there is room for `growth_bytes` that a pass will touch beside them, or let them
        come back.

        Raises: CapacityError if that cannot be had.
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
        """Likewise for what others touch, but slots never come back for it: it tells nothing of what passes need.

        Raises: CapacityError if that cannot be had.
        """
        room = self._room_beside(growth_bytes)
        have = self._slots.num_slots
        if room < have:
            have = self._slots.resize(max(room, self._min_slots))
        self._check(have, room, growth_bytes)

    def _room_beside(self, growth_bytes: int) -> int:
        """Measure, and return how many slots there is room for."""
        self.other_bytes = self._measure() - self._slots.taken_bytes
        return self._slots.within(self.limit_bytes - self.other_bytes - growth_bytes)

    def _check(self, have: int, room: int, growth_bytes: int) -> None:
        if have > room:
            raise CapacityError(
                f"the memory limit of {format_bytes(self.limit_bytes)} is reached: {format_bytes(self.other_bytes)} "
                f"are held beside experts, {format_bytes(growth_bytes)} more are needed, and {have} experts "
                "must stay. Raise the limit (--memory), or lower --max-num-seqs, --max-model-len or --kv-cache"
            )
