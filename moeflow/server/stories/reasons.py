"""Why a request took as long as it did: the phases that took longest, each in a sentence with its numbers."""

from __future__ import annotations

from typing import Final

import msgspec

from moeflow.server.stories.seen import Seen
from moeflow.server.stories.sentences import REASONS
from moeflow.server.stories.story import Story

MAX_PHASES: Final = 2
LEAST_SHARE: Final = 0.2  # of the whole time; what took less explains nothing
LEAST_ENGINE_SHARE: Final = 0.1
_MANY_OTHERS: Final = 0.1  # of the processor
_LONG_GAP: Final = 5.0  # times the mean gap


class Pace(msgspec.Struct, frozen=True):
    """What a request's speed is compared with. None: it is not known."""

    expected_tokens_per_s: float | None = None  # of one request alone, with as many tokens before each of the answer's
    other_programs: float | None = None  # their share of the processor while the request lasted


UNKNOWN_PACE: Final = Pace()


class Reason(msgspec.Struct, frozen=True):
    """A sentence. Its template with values in braces is for translations."""

    text: str
    template: str
    values: dict[str, str]


def slow_because(story: Story, seen: Seen, pace: Pace = UNKNOWN_PACE) -> list[Reason]:
    """Return the reasons: the phases that took longest, at least one, then the pace, and what the engine has seen.

    A refused request took no time that needs one.
    """
    if story.state == "refused":
        return []
    by_share = sorted(story.phase_s.items(), key=lambda item: item[1], reverse=True)
    large = [name for name, duration_s in by_share if duration_s >= LEAST_SHARE * story.total_s][:MAX_PHASES]
    longest = large or [by_share[0][0]]
    of_phases = [_of_phase(story, name) for name in longest]
    return [*of_phases, *(_of_pace(story, pace) if "decode" in longest else []), *_of_engine(story, seen)]


def seconds(duration_s: float) -> str:
    """Return a duration for people: 12 s, 1.2 s, 45 ms."""
    if duration_s < 0.1:
        return f"{duration_s * 1000:.0f} ms" if duration_s >= 0.001 else f"{duration_s * 1000:.1f} ms"
    return f"{duration_s:.1f} s" if duration_s < 10 else f"{duration_s:.0f} s"


def _reason(name: str, **values: str) -> Reason:
    template = REASONS[name]
    used = {key: value for key, value in values.items() if f"{{{key}}}" in template}
    return Reason(template.format(**used), template, used)


def _of_phase(story: Story, name: str) -> Reason:
    duration_s = story.phase_s[name]
    if name == "decode":
        return _decode(story, duration_s)
    if name == "queued" and story.sequences_ahead:
        name = "queued behind one" if story.sequences_ahead == 1 else "queued behind more"
    if name == "prompt" and story.cached_tokens:
        name = "prompt with cached part"
    return _reason(
        name,
        share=f"{100 * duration_s / story.total_s:.0f}%",
        time=seconds(duration_s),
        count=str(story.sequences_ahead if name.startswith("queued") else story.prompt_tokens),
        cached=str(story.cached_tokens),
    )


def _decode(story: Story, duration_s: float) -> Reason:
    time, count = seconds(duration_s), str(story.completion_tokens)
    if story.tokens_per_s is None:
        return _reason("decode of one token", time=time)
    gap_s, mean_s = story.slowest_gap_s or 0.0, duration_s / story.completion_tokens
    if gap_s > max(_LONG_GAP * mean_s, LEAST_SHARE * story.total_s):
        before = str(story.slowest_gap_at)
        return _reason("decode with a long gap", count=count, time=time, gap=seconds(gap_s), before=before)
    return _reason("decode", count=count, time=time, speed=f"{story.tokens_per_s:.1f}")


def _of_pace(story: Story, pace: Pace) -> list[Reason]:
    """Return how the speed of the answer compares with the plan's, and what stood in its way."""
    found = []
    if story.tokens_per_s is not None and pace.expected_tokens_per_s is not None:
        share = f"{100 * story.tokens_per_s / pace.expected_tokens_per_s:.0f}%"
        found.append(_reason("expected", expected=f"{pace.expected_tokens_per_s:.1f}", share=share))
    if pace.other_programs is not None and pace.other_programs >= _MANY_OTHERS:
        found.append(_reason("other programs", share=f"{100 * pace.other_programs:.0f}%"))
    return found


def _of_engine(story: Story, seen: Seen) -> list[Reason]:
    """Return what made passes slow or rare, if one thing did."""
    if not seen.passes or seen.not_observed:
        return []
    stall_s = sum(one.stall_s for one in seen.passes)
    computed_s = story.phase_s.get("prompt", 0.0) + story.phase_s.get("decode", 0.0)
    between_s = computed_s - sum(one.duration_s for one in seen.passes)
    if max(stall_s, between_s) >= LEAST_ENGINE_SHARE * story.total_s:
        name, longest_s = ("stalled", stall_s) if stall_s >= between_s else ("between passes", between_s)
        return [_reason(name, time=seconds(longest_s))]
    own = sum(one.tokens + one.drafted_tokens for one in seen.passes)
    others = sum(one.pass_tokens for one in seen.passes) - own
    return [_reason("shared passes", others=str(others), own=str(own))] if others >= own else []
