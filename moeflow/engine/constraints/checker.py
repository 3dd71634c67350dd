"""Asks whether grammars can be compiled, before an engine gets them. See `check_process`. Remembers the answers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from threading import Lock
from typing import Final

import msgspec

from moeflow.core.errors import RequestError
from moeflow.engine.constraints.check_messages import Accepted, CheckRequest, GrammarRefused, OutOfMemory, Reply
from moeflow.engine.constraints.constraints import NUM_KEPT
from moeflow.engine.constraints.vocabulary import NO_END, vocabulary_of
from moeflow.text.answer_form.form import UserGrammar
from moeflow.text.limited_process import LimitedProcesses
from moeflow.text.template_messages import frame
from moeflow.text.tokenizer import Tokenizer

_AROUND_BYTES: Final = 4096  # of a reply, in addition to the grammar
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


class GrammarChecker:
    """Checks grammars for a model. Any thread may call it."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer, self._eos_token_ids = tokenizer, eos_token_ids
        # An engine keeps as many, used in the same order: an accepted grammar is compiled there only once, too.
        self._known: OrderedDict[CheckRequest, Accepted | GrammarRefused] = OrderedDict()
        self._lock, self._starting = Lock(), Lock()

    def known(self, lark: str, users: UserGrammar | None = None) -> str | None:
        """Return the grammar as engines take it, if it was checked lately. Raises: RequestError if it was refused."""
        request = _request(lark, users)
        with self._lock:
            reply = self._known.get(request)
            if reply is None:
                return None
            self._known.move_to_end(request)
        return _grammar_of(reply)

    def check(self, lark: str, users: UserGrammar | None = None) -> str:
        """Return the grammar as engines take it. `users` are the grammars that it may refer to.

        Blocks: until it was compiled, `limits.CHECK_CPU_S` seconds of processor time at most.
        Raises: RequestError if it cannot be, or takes too much time or memory.
        """
        known = self.known(lark, users)
        if known is not None:
            return known
        request = _request(lark, users)
        reply = self._ask(request)
        with self._lock:
            self._known[request] = reply
            if len(self._known) > NUM_KEPT:
                self._known.popitem(last=False)
        return _grammar_of(reply)

    def close(self) -> None:
        """End the processes that are idle."""
        if "_processes" in vars(self):
            self._processes.close()

    @cached_property
    def _processes(self) -> LimitedProcesses:
        vocabulary = vocabulary_of(self._tokenizer, self._eos_token_ids)
        if not vocabulary.eos_token_ids:
            raise RequestError(NO_END)
        return LimitedProcesses("moeflow.engine.constraints.check_process", frame(vocabulary), _refusal_of)

    def _ask(self, request: CheckRequest) -> Accepted | GrammarRefused:
        message = frame(request)
        with self._starting:
            processes = self._processes
        try:
            with processes.one() as process:
                reply = _replies.decode(process.ask(message, 2 * len(message) + _AROUND_BYTES))
                if isinstance(reply, OutOfMemory):
                    raise _refusal_of("needs too much memory")
                return reply
        except RequestError:
            with suppress(RequestError, OSError):  # the next grammar should not wait for a process in its place
                processes.warm_up()
            raise


def _request(lark: str, users: UserGrammar | None) -> CheckRequest:
    return CheckRequest(lark) if users is None else CheckRequest(lark, users.text, users.is_regex)


def _grammar_of(reply: Accepted | GrammarRefused) -> str:
    if isinstance(reply, GrammarRefused):
        raise RequestError(f"the form of the answer is not supported: {reply.reason}")
    return reply.grammar


def _refusal_of(reason: str) -> RequestError:
    return RequestError(f"the form of the answer is too complex to be compiled: it {reason}")
