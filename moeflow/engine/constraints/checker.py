"""Asks whether grammars can be compiled, before an engine gets them. See `check_process`. Remembers those that can."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import msgspec

from moeflow.core.errors import RequestError
from moeflow.engine.constraints.check_messages import Accepted, CheckRequest, OutOfMemory, Refused, Reply
from moeflow.engine.text.answer_form.form import UserGrammar
from moeflow.engine.text.limited_process import LimitedProcesses
from moeflow.engine.text.template_messages import frame

NUM_KEPT: Final = 64
_AROUND_BYTES: Final = 4096  # of a reply, beside the grammar
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


class GrammarChecker:
    """Checks grammars. Any thread may call it."""

    def __init__(self) -> None:
        self._processes = LimitedProcesses(
            "moeflow.engine.constraints.check_process", frame(CheckRequest("")), _refusal_of
        )
        self._accepted: OrderedDict[CheckRequest, str] = OrderedDict()

    def check(self, lark: str, users: UserGrammar | None = None) -> str:
        """Return the grammar as engines take it. `users` is what it may refer to.

        Blocks: until it was compiled, some `worker_limits.CPU_S` seconds at most.
        Raises: RequestError if it cannot be, or takes too much time or memory.
        """
        request = CheckRequest(lark) if users is None else CheckRequest(lark, users.text, users.is_regex)
        known = self._accepted.get(request)
        if known is None:
            known = self._accepted[request] = self._ask(request)
            if len(self._accepted) > NUM_KEPT:
                self._accepted.popitem(last=False)
        return known

    def close(self) -> None:
        """End the processes that are idle."""
        self._processes.close()

    def _ask(self, request: CheckRequest) -> str:
        message = frame(request)
        with self._processes.one() as process:
            reply = _replies.decode(process.ask(message, 2 * len(message) + _AROUND_BYTES))
            process.is_done |= isinstance(reply, OutOfMemory)
        match reply:
            case Accepted():
                return reply.grammar
            case Refused():
                raise RequestError(f"the form of the answer is not supported: {reply.reason}")
            case OutOfMemory():
                raise _refusal_of("needs too much memory")


def _refusal_of(reason: str) -> RequestError:
    return RequestError(f"the form of the answer is too complex to be compiled: it {reason}")
