"""Short texts are not held up by long ones, and both are worked on a few at a time."""

from __future__ import annotations

import asyncio
import threading

import pytest

from moeflow.text.text_lanes import LONG_CHARS, NUM_LONG, NUM_SHORT, TextLanes
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "asyncio"


class Work:
    """Work that lasts until it is released, and counts itself."""

    def __init__(self):
        self.release = threading.Event()
        self.running = self.most = self.begun = 0
        self._lock = threading.Lock()

    def __call__(self):
        with self._lock:
            self.running += 1
            self.begun += 1
            self.most = max(self.most, self.running)
        self.release.wait(30)
        with self._lock:
            self.running -= 1
        return "done"


async def begun(work, number):
    while work.begun < number:
        await asyncio.sleep(0.001)


@pytest.mark.parametrize(("num_chars", "at_once"), [(LONG_CHARS + 1, NUM_LONG), (LONG_CHARS, NUM_SHORT)])
async def test_only_so_many_are_worked_on_at_once(num_chars, at_once):
    lanes, work = TextLanes(), Work()
    waiting = [asyncio.create_task(lanes.run(num_chars, work)) for _ in range(10)]
    await begun(work, at_once)
    await asyncio.sleep(0.05)
    work.release.set()
    assert await asyncio.gather(*waiting) == ["done"] * 10
    assert work.most == at_once


async def test_short_texts_pass_long_ones():
    lanes, long = TextLanes(), Work()
    waiting = [asyncio.create_task(lanes.run(10**6, long)) for _ in range(3)]
    await begun(long, 1)
    assert await asyncio.wait_for(lanes.run(5, lambda: "short"), PATIENCE_S) == "short"
    assert not any(task.done() for task in waiting)
    long.release.set()
    await asyncio.gather(*waiting)


async def test_what_nobody_waits_for_any_more_is_not_begun():
    lanes, long = TextLanes(), Work()
    first = asyncio.create_task(lanes.run(10**6, long))
    await begun(long, 1)
    second = asyncio.create_task(lanes.run(10**6, long))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    long.release.set()
    assert await first == "done"
    assert await lanes.run(10**6, lambda: "next") == "next"
    assert long.begun == 1
