"""Why a request took as long as it did: the phases that took longest, each in a sentence with its numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from moeflow.server.stories.seen import Seen
from moeflow.server.stories.story import Story

MAX_PHASES: Final = 2
LEAST_SHARE: Final = 0.2  # of the whole time; what took less explains nothing
LEAST_ENGINE_SHARE: Final = 0.1
_LONG_GAP: Final = 5.0  # times the mean gap


class Reason(msgspec.Struct, frozen=True):
    """A sentence. Its template with values in braces is for translations."""

    text: str
    template: str
    values: dict[str, str]


def slow_because(story: Story, seen: Seen) -> list[Reason]:
    """Return the reasons: the phases that took longest, at least one, and then what the engine has seen."""
    by_share = sorted(story.phase_s.items(), key=lambda item: item[1], reverse=True)
    large = [name for name, duration_s in by_share if duration_s >= LEAST_SHARE * story.total_s][:MAX_PHASES]
    of_phases = [_SENTENCES[name](story, story.phase_s[name]) for name in large or [by_share[0][0]]]
    return [*of_phases, *_of_engine(story, seen)]


def _of_engine(story: Story, seen: Seen) -> list[Reason]:
    """Return what made passes slow or rare, if one thing did."""
    if not seen.passes or seen.not_observed:
        return []
    stall_s = sum(one.stall_s for one in seen.passes)
    computed_s = story.phase_s.get("prompt", 0.0) + story.phase_s.get("decode", 0.0)
    between_s = computed_s - sum(one.duration_s for one in seen.passes)
    longest_s = max(stall_s, between_s)
    if longest_s >= LEAST_ENGINE_SHARE * story.total_s:
        if stall_s == longest_s:
            return [_reason("Passes waited {time} for experts from disk.", time=seconds(stall_s))]
        template = "{time} of it lay between its passes: the engine computed others, or waited for the processor."
        return [_reason(template, time=seconds(between_s))]
    own = sum(one.tokens + one.drafted_tokens for one in seen.passes)
    others = sum(one.pass_tokens for one in seen.passes) - own
    if others < own:
        return []
    template = "Its passes computed {others} tokens of other requests, beside {own} of its own."
    return [_reason(template, others=str(others), own=str(own))]


def seconds(duration_s: float) -> str:
    """Return a duration for people: 12 s, 1.2 s, 45 ms."""
    if duration_s < 0.1:
        return f"{duration_s * 1000:.0f} ms" if duration_s >= 0.001 else f"{duration_s * 1000:.1f} ms"
    return f"{duration_s:.1f} s" if duration_s < 10 else f"{duration_s:.0f} s"


def _reason(template: str, **values: str) -> Reason:
    return Reason(template.format(**values), template, values)


def _share(story: Story, duration_s: float) -> str:
    return f"{100 * duration_s / story.total_s:.0f}%"


def _received(story: Story, duration_s: float) -> Reason:
    template = "{share} of the time ({time}) passed before it was admitted: its body came, or its model was loaded."
    return _reason(template, share=_share(story, duration_s), time=seconds(duration_s))


def _tokenized(story: Story, duration_s: float) -> Reason:
    template = "{share} of the time ({time}) made {count} tokens of the prompt's text, or compiled its grammar."
    values = {"share": _share(story, duration_s), "time": seconds(duration_s), "count": str(story.prompt_tokens)}
    return _reason(template, **values)


def _queued(story: Story, duration_s: float) -> Reason:
    values = {"share": _share(story, duration_s), "time": seconds(duration_s), "count": str(story.sequences_ahead)}
    if story.sequences_ahead == 1:
        template = "{share} of the time ({time}) was spent waiting in the queue: one other sequence was there first."
    elif story.sequences_ahead:
        template = (
            "{share} of the time ({time}) was spent waiting in the queue: {count} other sequences were there first."
        )
    else:
        template = "{share} of the time ({time}) was spent waiting in the queue for the running pass to end."
    return _reason(template, **values)


def _waiting(story: Story, duration_s: float) -> Reason:
    template = "The engine has brought nothing for {time}: the request is in the queue, or its prompt is computed."
    return _reason(template, time=seconds(duration_s))


def _prompt(story: Story, duration_s: float) -> Reason:
    values = {"count": str(story.prompt_tokens), "time": seconds(duration_s), "cached": str(story.cached_tokens)}
    if story.cached_tokens:
        template = "The prompt of {count} tokens took {time}; {cached} of them were in the prefix cache."
    else:
        template = "The prompt of {count} tokens took {time}; none of it was in the prefix cache."
    return _reason(template, **values)


def _decode(story: Story, duration_s: float) -> Reason:
    values = {"count": str(story.completion_tokens), "time": seconds(duration_s)}
    if story.tokens_per_s is None:
        return _reason("The answer ended {time} after its first token.", time=seconds(duration_s))
    values |= {"speed": f"{story.tokens_per_s:.1f}"}
    gap_s, mean_s = story.slowest_gap_s or 0.0, duration_s / story.completion_tokens
    if gap_s > max(_LONG_GAP * mean_s, LEAST_SHARE * story.total_s):
        template = "{count} tokens took {time}, of which one wait of {gap} came after {before} tokens."
        return _reason(template, **values, gap=seconds(gap_s), before=str(story.slowest_gap_at))
    return _reason("The {count} tokens of the answer took {time}, at {speed} tokens/s.", **values)


def _sent(story: Story, duration_s: float) -> Reason:
    template = "{share} of the time ({time}) passed after the last token, until the client had the answer."
    return _reason(template, share=_share(story, duration_s), time=seconds(duration_s))


_SENTENCES: Final[dict[str, Callable[[Story, float], Reason]]] = {
    "received": _received,
    "tokenized": _tokenized,
    "queued": _queued,
    "waiting": _waiting,
    "prompt": _prompt,
    "decode": _decode,
    "sent": _sent,
}
