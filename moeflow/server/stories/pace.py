"""Whether the answer of a request came as fast as the plan expects, and how much other programs were in its way."""

from __future__ import annotations

import asyncio

from moeflow.planner.served.served_estimate import ServedEstimate
from moeflow.server.speed.model_speed import ModelSpeed
from moeflow.server.stories.reasons import UNKNOWN_PACE, Pace
from moeflow.server.stories.story import Story


async def pace_of(known: ModelSpeed | None, story: Story) -> Pace:
    """Return what is known. Takes some milliseconds in a thread."""
    if known is None:
        return UNKNOWN_PACE
    estimate = await known.estimate()
    return await asyncio.to_thread(_pace, known, None if isinstance(estimate, str) else estimate, story)


def _pace(known: ModelSpeed, estimate: ServedEstimate | None, story: Story) -> Pace:
    known.others.look_now()
    end_s = story.started_at + story.total_s
    return Pace(_expected(estimate, story), known.others.share_during(story.started_at, end_s))


def _expected(estimate: ServedEstimate | None, story: Story) -> float | None:
    if estimate is None or story.sequences != 1:
        return None
    step_s = estimate.step_s(1, story.prompt_tokens + story.completion_tokens / 2)
    return None if step_s is None else 1 / step_s
