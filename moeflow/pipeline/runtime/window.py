"""How far ahead of the work a stream of tasks is read: the same for the executor and for the virtual clock.

Knows nothing of what becomes of the tasks, only how many of them are unfinished.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from moeflow.pipeline.task import Task, checked

WINDOW = 256  # unfinished tasks at once
_READS_PER_TURN = 8  # tasks read ahead for each one done: the first should not wait for a whole window


class Window:
    """A stream, of which at most `size` tasks are read and unfinished."""

    def __init__(self, tasks: Iterable[Task], size: int) -> None:
        self.is_at_end = False  # of the stream, as far as reading has shown
        self._tasks = checked(tasks)
        self._size = size

    def has_room(self, num_unfinished: int) -> bool:
        """Return whether there is anything to read, and may be."""
        return not self.is_at_end and num_unfinished < self._size

    def read(self, num_unfinished: int) -> list[Task]:
        """Return the next tasks of the stream, a few at once; none if there is no room or no more of them.

        Raises: ValueError if one does not come after those that it waits for.
        """
        if not self.has_room(num_unfinished):
            return []
        wanted = min(self._size - num_unfinished, _READS_PER_TURN)
        tasks = list(islice(self._tasks, wanted))
        self.is_at_end = len(tasks) < wanted
        return tasks
