"""Where the time of a request went: phases one after the other, from times that are taken anyway."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from moeflow.server.request_log import GeneratedWork


class Phase(msgspec.Struct, frozen=True):
    """One part of a request's time, by its name.

    "received" lasts until the request is admitted: its body is read, its model loaded if need be. "tokenized" ends when
    the engine gets the request, "queued" with its first pass, "prompt" with its first token. "decode" lasts until the
    last token, and "sent" until the client has the answer. The engine's first output tells how long a request was
    queued: before it, "waiting" stands for queue and prompt.
    """

    name: str
    start_s: float  # from the start of the request
    duration_s: float


def phases_of(started_s: float, work: GeneratedWork, now_s: float) -> list[Phase]:
    """Return the phases of a request from its start until now, without gaps. Times are on one monotonic clock."""
    phases, begin_s = [], started_s
    for name, at_s in _ends(work):
        end_s = now_s if at_s is None else min(max(at_s, begin_s), now_s)
        phases.append(Phase(name, begin_s - started_s, end_s - begin_s))
        if at_s is None:
            break
        begin_s = end_s
    return phases


def _ends(work: GeneratedWork) -> Iterator[tuple[str, float | None]]:
    """Yield when each phase ended. The first None is that of the phase that lasts."""
    yield "received", work.admitted_s
    yield "tokenized", work.begun_at_s
    if work.queued_s is None:
        yield "waiting", work.ended_at_s
    else:
        prompt_end_s = work.ended_at_s if work.first_token_at_s is None else work.first_token_at_s
        joined_s = (work.begun_at_s or 0.0) + work.queued_s  # by the engine's clock, so it may be a little late
        yield "queued", joined_s if prompt_end_s is None else min(joined_s, prompt_end_s)
        yield "prompt", prompt_end_s
        if work.first_token_at_s is not None:
            yield "decode", work.ended_at_s
    yield "sent", None
