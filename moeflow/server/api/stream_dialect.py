"""Events of each API that need no answer: the heartbeat, and the error of a request that fails at its start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from moeflow.server.errors import ApiError
from moeflow.server.sse import COMMENT, EVENTS, event, named_event


@dataclass(frozen=True, slots=True)
class StreamDialect:
    """The events of one API that stand outside of an answer."""

    ping: bytes  # to send where nothing else comes for long
    failure: Callable[[ApiError], bytes]  # the event of a stream that ends before its answer begins
    media_type: str = EVENTS


def _response_failure(error: ApiError) -> bytes:
    detail = error.body["error"]
    fields = {"code": detail["code"], "message": detail["message"], "param": detail["param"]}
    return named_event({"type": "error", "sequence_number": 0, **fields})


LISTS: Final = StreamDialect(COMMENT, lambda error: event(error.body))  # chat completions and completions
RESPONSES: Final = StreamDialect(COMMENT, _response_failure)
MESSAGES: Final = StreamDialect(
    named_event({"type": "ping"}),
    lambda error: named_event(error.anthropic_body),
)
