"""Compiles grammars to see whether they can be, in a process of its own: they come from whoever may send requests.

Run as `python -m moeflow.engine.constraints.check_process` with a socket as standard input, within `worker_limits`.
What nests so deeply that it needs more stack than a thread has here ends this process, and never comes to an engine.
"""

from __future__ import annotations

import json
import socket
import threading
from typing import Any, Final

import msgspec
from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from moeflow.engine.constraints.check_messages import Accepted, CheckRequest, OutOfMemory, Refused, Reply
from moeflow.engine.constraints.limits import LIMITS, reason_of
from moeflow.engine.text.answer_form.lark import USER
from moeflow.engine.text.template_messages import MAX_REASON, frame, receive
from moeflow.engine.text.worker_limits import limit_cpu_time, run

STACK_BYTES: Final = 2 * 2**20  # a quarter of what an engine's threads have


def serve(connection: socket.socket) -> None:
    """Answer until the other side is gone, or memory has run out. The first message says nothing."""
    receive(connection)
    while (raw := receive(connection)) is not None:
        limit_cpu_time()
        reply = _check(raw)
        connection.sendall(frame(reply))
        if isinstance(reply, OutOfMemory):
            return


def _check(raw: bytes) -> Reply:
    try:
        request = msgspec.msgpack.decode(raw, type=CheckRequest)
        grammar = _grammar(request)
        is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=LIMITS)
        return Refused(reason_of(messages[0])[:MAX_REASON]) if is_error else Accepted(grammar)
    except MemoryError:
        return OutOfMemory()
    except Exception as error:
        return Refused(str(error)[:MAX_REASON].encode(errors="replace").decode())


def _grammar(request: CheckRequest) -> str:
    if not request.user_text:
        return request.lark
    if request.is_regex:
        ((users,), *_) = json.loads(LLMatcher.grammar_from_regex(request.user_text)).values()
    else:
        users = {"lark_grammar": any_to_lark(request.user_text)}
    grammars: list[dict[str, Any]] = [{"name": "answer", "lark_grammar": request.lark}, {**users, "name": USER}]
    return json.dumps({"grammars": grammars})


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
