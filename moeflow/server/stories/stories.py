"""The stories of the last requests, and of those under way: those of this process, and of others that answer for it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

from moeflow.server.request_log import GeneratedWork, RequestRecord
from moeflow.server.stories.story import Story, refused_story, story_of

MAX_STORIES: Final = 200  # of finished requests
MAX_REFUSED: Final = 50  # kept apart: a flood of them must not displace others
RunningElsewhere = Callable[[], Awaitable[list[Story]]]


class Stories:
    """Keeps the last stories. To keep one takes about 30 µs, once in a request."""

    def __init__(self) -> None:
        self._running: dict[int, RequestRecord] = {}  # by identity: clients may send one id again and again
        self._finished: deque[Story] = deque(maxlen=MAX_STORIES)  # in the order of their ends
        self._refused: deque[Story] = deque(maxlen=MAX_REFUSED)
        self._on_end: Callable[[Story], None] = self.keep
        self._elsewhere: list[RunningElsewhere] = []

    def hand_over(self, on_end: Callable[[Story], None]) -> None:
        """Give finished stories to another process, and keep none."""
        self._on_end = on_end

    def begin(self, record: RequestRecord, work: GeneratedWork) -> None:
        """Note that a request has begun its work; `end` must follow."""
        record.work = work
        self._running[id(record)] = record

    def end(self, record: RequestRecord) -> None:
        """Keep the story of a request that is over, or was refused, if it has one."""
        is_known = self._running.pop(id(record), None) is not None
        story = story_of(record, is_over=True) if is_known else refused_story(record)
        if story is not None:
            self._on_end(story)

    def keep(self, story: Story) -> None:
        """Keep a story of this process, or one that another tells."""
        (self._refused if story.state == "refused" else self._finished).append(story)

    def ask_also(self, running: RunningElsewhere) -> Callable[[], None]:
        """Have another process tell what runs there. Return what to call when it is gone."""
        self._elsewhere.append(running)
        return lambda: self._elsewhere.remove(running)

    def running(self) -> list[Story]:
        """Return the stories so far of what runs in this process."""
        return [story_of(record, is_over=False) for record in self._running.values()]

    async def all(self) -> list[Story]:
        """Return the stories of running and of finished requests; the request that came last is the first."""
        elsewhere = await asyncio.gather(*(running() for running in self._elsewhere))
        finished = {story.object_id for story in self._finished}  # some have ended since they were told of as running
        running = [story for story in sum(elsewhere, self.running()) if story.object_id not in finished]
        return sorted([*running, *self._finished, *self._refused], key=lambda story: story.started_at, reverse=True)
