"""A model's chat template, rendered in processes that may be killed. See `template_process` for the limits.

One process is kept ready for each rendering that was ever under way at once, so an ordinary conversation costs two
messages over a socket. Knows nothing of tokens.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from moeflow.core.errors import ChatTemplateError, RequestError
from moeflow.core.units import MIB
from moeflow.engine.text.template_messages import (
    Failed,
    Opening,
    Refused,
    Rendered,
    RenderRequest,
    Reply,
    TooLong,
    frame,
    receive,
)

WAIT_S = 30.0  # for a process that gets no processor time; one that does is ended by its own limit
_AROUND_BYTES = MIB  # of a prompt, beside twice the messages: what a template may add
_FRAME_BYTES = 4096  # of a reply, beside the prompt
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


class ChatTemplate:
    """Turns conversations into prompts. Any thread may call it."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        self._opening = frame(Opening(source, dict(variables)))
        self._idle: list[_TemplateProcess] = []
        self._finalizer = weakref.finalize(self, _end_all, self._idle)

    def warm_up(self) -> None:
        """Start a process, so that the first conversation need not wait for it."""
        process = _TemplateProcess(self._opening)
        self._idle.append(process)
        process.send_opening()

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the prompt that asks for the next message.

        Blocks: until it is rendered, some `template_process.CPU_S` seconds at most.
        Raises: RequestError if the template refuses the messages; ChatTemplateError if it is broken or exceeds
        its limits.
        """
        try:
            encoded = msgspec.msgpack.encode([dict(message) for message in messages])
        except (TypeError, ValueError, OverflowError, RecursionError) as error:  # a lone surrogate is a ValueError
            raise RequestError(f"the messages are not valid Unicode, or no JSON: {error}", param="messages") from None
        max_bytes = 2 * len(encoded) + _AROUND_BYTES
        reply = self._ask(frame(RenderRequest(msgspec.Raw(encoded), max_bytes)), max_bytes + _FRAME_BYTES)
        match reply:
            case Rendered():
                return reply.text
            case TooLong():
                raise _failure(f"makes a prompt of {reply.num_bytes} bytes of {len(encoded)} bytes of messages")
            case Refused():
                raise RequestError(f"the model's chat template refuses the messages: {reply.reason}", param="messages")
            case Failed():
                raise _failure(reply.reason)

    def close(self) -> None:
        """End all processes that are idle; later calls start new ones."""
        _end_all(self._idle)

    def _ask(self, request: bytes, max_reply_bytes: int) -> Reply:
        process = self._take()
        try:
            reply = process.ask(request, max_reply_bytes)
        except BaseException:
            process.kill()
            raise
        if isinstance(reply, Failed):
            process.kill()
        else:
            self._idle.append(process)
        return reply

    def _take(self) -> _TemplateProcess:
        while True:
            try:
                process = self._idle.pop()
            except IndexError:
                return _TemplateProcess(self._opening)
            if process.is_alive:
                return process
            process.kill()


class _TemplateProcess:
    """One process and the socket to it."""

    def __init__(self, opening: bytes) -> None:
        self._connection, theirs = socket.socketpair()
        try:
            with theirs:
                # A session of its own: Ctrl-C in the terminal must not reach it.
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "moeflow.engine.text.template_process"],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                )
        except OSError as error:
            self._connection.close()
            raise ChatTemplateError(f"no process can be started to render the chat template: {error}") from None
        self._opening = opening
        self._is_open = False

    @property
    def is_alive(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    def send_opening(self) -> None:
        """Send the template to be compiled, unless that was done before. Raises: OSError."""
        self._connection.settimeout(WAIT_S)
        if not self._is_open:
            self._is_open = True
            self._connection.sendall(self._opening)

    def ask(self, request: bytes, max_reply_bytes: int) -> Reply:
        """Send a request and return the answer; whoever calls kills the process if this raises.

        Raises: ChatTemplateError.
        """
        deadline = time.monotonic() + WAIT_S
        try:
            self.send_opening()
            self._connection.sendall(request)
            self._connection.settimeout(max(deadline - time.monotonic(), 0.001))
            raw = receive(self._connection, max_reply_bytes)
        except TimeoutError:
            raise _failure(f"gave no answer within {WAIT_S:.0f} s") from None
        except OSError as error:
            raise _failure(f"ended its process: {self._cause(str(error))}") from None
        if raw is None:
            raise _failure(self._cause("its process closed the connection"))
        return _replies.decode(raw)

    def _cause(self, otherwise: str) -> str:
        """Return why the process has ended, if it has."""
        try:
            code = self._process.wait(1)
        except subprocess.TimeoutExpired:
            return otherwise
        if code == -signal.SIGXCPU:
            return "needs too much processor time"
        return f"its process ended with code {code}" if code >= 0 else f"its process ended by signal {-code}"

    def kill(self) -> None:
        """Leave nothing of it."""
        self._process.kill()
        self._process.wait()
        self._connection.close()


def _failure(problem: str) -> ChatTemplateError:
    return ChatTemplateError(
        f"the model's chat template {problem}. If a shorter conversation fails too, correct the template: "
        "chat_template.jinja, or chat_template in tokenizer_config.json"
    )


def _end_all(processes: list[_TemplateProcess]) -> None:
    while processes:
        processes.pop().kill()
