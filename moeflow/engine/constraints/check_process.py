"""Compiles grammars for a check, in a process of its own: they come from untrusted clients.

Run as `python -m moeflow.engine.constraints.check_process` with a socket as standard input, within `worker_limits`.
The first message is the vocabulary. What nests so deeply that it needs more stack than a thread has here ends this
process, and never comes to an engine. A walk along a few tokens meets most limits that the answer would meet.
"""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections.abc import Collection
from typing import Any, Final

import msgspec
from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from moeflow.engine.constraints.check_messages import Accepted, CheckRequest, GrammarRefused, OutOfMemory, Reply
from moeflow.engine.constraints.grammar_tokens import for_grammars
from moeflow.engine.constraints.limits import CHECK_CPU_S, LIMITS, MASK_CPU_S, TOO_SLOW, reason_of
from moeflow.engine.constraints.priority import COMPILING, lower
from moeflow.engine.constraints.vocabulary import Vocabulary
from moeflow.text.answer_form.lark import USER
from moeflow.text.template_messages import MAX_REASON, frame, receive
from moeflow.text.worker_limits import limit_cpu_time, run

STACK_BYTES: Final = 2 * 2**20  # a quarter of what an engine's threads have
NUM_STEPS: Final = 8  # tokens that are tried, and the masks before them


def serve(connection: socket.socket) -> None:
    """Answer until the other side is gone, or memory has run out."""
    opening = receive(connection)
    if opening is None:
        return
    vocabulary = msgspec.msgpack.decode(opening, type=Vocabulary)
    tokens = for_grammars(vocabulary)
    lower(COMPILING)
    while (raw := receive(connection)) is not None:
        limit_cpu_time(CHECK_CPU_S)
        reply = _check(raw, tokens, vocabulary.eos_token_ids)
        connection.sendall(frame(reply))
        if isinstance(reply, OutOfMemory):
            return


def _check(raw: bytes, tokens: LLTokenizer, eos_token_ids: Collection[int]) -> Reply:
    try:
        request = msgspec.msgpack.decode(raw, type=CheckRequest)
        grammar = _grammar(request)
        matcher = LLMatcher(tokens, grammar, limits=LIMITS, log_level=0)
        reason = _first_problem(matcher, eos_token_ids, request.lark)
        return Accepted(grammar) if reason is None else GrammarRefused(reason[:MAX_REASON])
    except MemoryError:
        return OutOfMemory()
    except Exception as error:
        return GrammarRefused(str(error)[:MAX_REASON].encode(errors="replace").decode())


def _grammar(request: CheckRequest) -> str:
    if not request.user_text:
        return request.lark
    if request.is_regex:
        if _ends_in_escape(request.user_text):
            raise ValueError("the regular expression ends in a backslash: write two for the character itself")
        ((users,), *_) = json.loads(LLMatcher.grammar_from_regex(request.user_text)).values()
    else:
        users = {"lark_grammar": any_to_lark(request.user_text)}
    grammars: list[dict[str, Any]] = [{"name": "answer", "lark_grammar": request.lark}, {**users, "name": USER}]
    return json.dumps({"grammars": grammars})


def _ends_in_escape(regex: str) -> bool:
    """Whether a backslash at the end has nothing to escape. llguidance would drop it."""
    return (len(regex) - len(regex.rstrip("\\"))) % 2 == 1


def _first_problem(matcher: LLMatcher, eos_token_ids: Collection[int], lark: str) -> str | None:
    """Return why the grammar cannot be followed for its first tokens; None: it can."""
    chooser = random.Random(0)
    for _ in range(NUM_STEPS):
        started_s = time.thread_time()
        allowed = matcher.compute_bitmask()
        if matcher.is_error():
            break
        if time.thread_time() - started_s > MASK_CPU_S:
            return TOO_SLOW
        token_id = None if matcher.is_stopped() else _any_token(allowed, eos_token_ids, chooser)
        if token_id is None:
            return None
        matcher.consume_token(token_id)
    return reason_of(matcher.get_error(), lark) if matcher.is_error() else None


def _any_token(allowed: bytes, eos_token_ids: Collection[int], chooser: random.Random) -> int | None:
    """Return an allowed token that does not end the answer; None: there is none."""
    places = [place for place, bits in enumerate(allowed) if bits]
    chooser.shuffle(places)
    for place in places:
        for token_id in range(8 * place, 8 * place + 8):
            if allowed[place] >> token_id % 8 & 1 and token_id not in eos_token_ids:
                return token_id
    return None


def _serve_in_thread(connection: socket.socket) -> None:
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=serve, args=(connection,))
    thread.start()
    thread.join()


def main() -> None:
    """Entry point of the process."""
    run(_serve_in_thread)


if __name__ == "__main__":
    main()
