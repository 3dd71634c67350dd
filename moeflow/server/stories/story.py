"""The story of one request: its counts, its end, and where its time went. Plain data without any text.

Text of a prompt or an answer is never in it, except in an error's message.
"""

from __future__ import annotations

import time
from typing import Literal

import msgspec

from moeflow.server.request_log import RequestRecord
from moeflow.server.stories.phases import Phase, phases_of

State = Literal["running", "done", "stopped", "failed", "refused"]
_ERROR_CHARACTERS = 500
_GENERATE = frozenset(  # endpoints whose refused requests are listed
    (
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/embeddings",
        "/api/chat",
        "/api/generate",
        "/api/embed",
        "/api/embeddings",
    )
)


class Story(msgspec.Struct, frozen=True, kw_only=True):
    """One request that generates text or makes vectors. Counts add up over its sequences."""

    id: str  # of the HTTP request, or of a line of a batch job
    object_id: str  # of the answer's object, as chatcmpl-…; sequences in the engine have it as the beginning of theirs
    endpoint: str  # its path
    model: str
    key: str | None  # the name of the API key; None: no key was needed, or a batch job asked
    is_batch: bool  # a line of a batch job
    state: State  # stopped: the client left before the end; refused: its work never began
    end: str  # the word for it in the request log: reasons of sequences, an error's code, "disconnected"; "": running
    error: str | None
    status: int | None = None  # of its answer; None: none was begun
    started_at: float  # unix seconds
    total_s: float  # so far
    phases: list[Phase]  # in order, without gaps: their durations add up to the total
    prompt_tokens: int
    cached_tokens: int  # of these, found in the prefix tree, which the prompt cache on disk fills
    completion_tokens: int
    sequences: int  # prompts, times completions of each
    sequences_ahead: int  # that ran or waited when it came
    drafted_tokens: int  # that passes computed
    accepted_tokens: int  # of these, right ones, as in `usage`: the last token of an answer does not count
    first_token_s: float | None  # from the start of the request
    tokens_per_s: float | None  # from the first token to the last; None: fewer than two
    slowest_gap_s: float | None  # between the tokens of two passes, of one sequence
    slowest_gap_at: int | None  # completion tokens before that gap

    @property
    def phase_s(self) -> dict[str, float]:
        """The duration of each phase."""
        return {phase.name: phase.duration_s for phase in self.phases}

    def is_named(self, name: str) -> bool:
        """Whether this is one of its ids."""
        return name in (self.id, self.object_id)


def story_of(record: RequestRecord, *, is_over: bool) -> Story:
    """Return the story, as of now, of a request that has begun its work."""
    work, now_s = record.work, time.monotonic()
    assert work is not None, "a request without work has no story"
    failure = record.error or work.failure
    first_s, last_s, num_tokens = work.first_token_at_s, work.last_token_at_s, work.num_completion_tokens
    decode_s = 0.0 if first_s is None or last_s is None else last_s - first_s
    return Story(
        id=record.request_id,
        object_id=work.request_id,
        endpoint=record.path,
        model=work.model_name,
        key=record.account.name if record.account else None,
        is_batch=work.is_batch,
        state=_state_of(record) if is_over else "running",
        end=record.end if is_over else "",
        error=failure.detail[:_ERROR_CHARACTERS] if failure else None,
        status=record.status,
        started_at=time.time() - (now_s - record.started_s),
        total_s=now_s - record.started_s,
        phases=phases_of(record.started_s, work, now_s),
        prompt_tokens=work.num_prompt_tokens,
        cached_tokens=work.num_cached_tokens,
        completion_tokens=num_tokens,
        sequences=work.num_sequences,
        sequences_ahead=work.num_ahead,
        drafted_tokens=work.num_drafted_tokens,
        accepted_tokens=work.num_accepted_tokens,
        first_token_s=None if first_s is None else first_s - record.started_s,
        tokens_per_s=(num_tokens - 1) / decode_s if decode_s and num_tokens > 1 else None,
        slowest_gap_s=work.slowest_gap_s,
        slowest_gap_at=work.slowest_gap_at,
    )


def refused_story(record: RequestRecord) -> Story | None:
    """Return the story of a request for a generation that was refused; None: it was none, or had no right key."""
    if record.work is not None or record.error is None or record.endpoint not in _GENERATE or record.status == 401:
        return None
    total_s = time.monotonic() - record.started_s
    return Story(
        id=record.request_id,
        object_id="",
        endpoint=record.endpoint,
        model="",  # it may name none that is served
        key=record.account.name if record.account else None,
        is_batch=False,
        state="refused",
        end=record.end,
        error=record.error.detail[:_ERROR_CHARACTERS],
        status=record.status,
        started_at=time.time() - total_s,
        total_s=total_s,
        phases=[Phase("received", 0.0, total_s)],
        prompt_tokens=0,
        cached_tokens=0,
        completion_tokens=0,
        sequences=0,
        sequences_ahead=0,
        drafted_tokens=0,
        accepted_tokens=0,
        first_token_s=None,
        tokens_per_s=None,
        slowest_gap_s=None,
        slowest_gap_at=None,
    )


def with_queue_known(story: Story, queued_s: float | None) -> Story:
    """Return a story in which "waiting" is parted: the engine has told how long the request was queued."""
    *before, waiting = story.phases
    if queued_s is None or story.state != "running" or waiting.name != "waiting":
        return story
    queued_s = min(queued_s, waiting.duration_s)
    queued = Phase("queued", waiting.start_s, queued_s)
    prompt = Phase("prompt", waiting.start_s + queued_s, waiting.duration_s - queued_s)
    return msgspec.structs.replace(story, phases=[*before, queued, prompt])


def _state_of(record: RequestRecord) -> State:
    if record.error or (record.work and record.work.failure):
        return "failed"
    return "stopped" if record.end == "disconnected" else "done"
