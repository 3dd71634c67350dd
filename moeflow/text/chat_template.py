"""A model's chat template, rendered in processes that may be killed. See `template_process` for the limits.

Knows nothing of tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from moeflow.core.errors import ChatTemplateError, RequestError
from moeflow.core.units import MIB
from moeflow.text.limited_process import LimitedProcesses
from moeflow.text.template_messages import (
    Opening,
    Rendered,
    RenderRequest,
    Reply,
    TemplateFailed,
    TemplateRefused,
    TooLong,
    frame,
)

_AROUND_BYTES = MIB  # of a prompt, beside twice the messages: what a template may add
_FRAME_BYTES = 4096  # of a reply, in addition to the prompt
_NO_VARIABLES: Mapping[str, Any] = MappingProxyType({})
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


class ChatTemplate:
    """Turns conversations into prompts. Any thread may call it."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        opening = frame(Opening(source, dict(variables)))
        self._processes = LimitedProcesses("moeflow.text.template_process", opening, _failure)

    def warm_up(self) -> None:
        """Start a process, so that the first conversation need not wait for it."""
        self._processes.warm_up()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] = _NO_VARIABLES,
        *,
        continues_last: bool = False,
    ) -> str:
        """Return the prompt that asks for the next message, or for the rest of the last one with `continues_last`.

        The template may use `variables`, too.

        Blocks: until it is rendered, `worker_limits.CPU_S` seconds of processor time at most.
        Raises: RequestError if the template refuses the messages; ChatTemplateError if it is broken or exceeds
        its limits.
        """
        try:
            encoded = msgspec.json.encode([dict(message) for message in messages])
            described = json.dumps([dict(tool) for tool in tools])
            named = json.dumps(dict(variables))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:  # a lone surrogate is a ValueError
            raise RequestError(f"the messages are not valid Unicode, or no JSON: {error}", param="messages") from None
        size = len(encoded) + len(described) + len(named)
        max_bytes = 2 * size + _AROUND_BYTES
        request = RenderRequest(encoded, described, named, max_bytes, continues_last)
        with self._processes.one() as process:
            reply = _replies.decode(process.ask(frame(request), max_bytes + _FRAME_BYTES))
            process.is_done |= isinstance(reply, TemplateFailed)
        match reply:
            case Rendered():
                return reply.text
            case TooLong():
                raise _failure(f"makes a prompt of {reply.num_bytes} bytes of {size} bytes of messages")
            case TemplateRefused():
                raise RequestError(f"the model's chat template refuses the messages: {reply.reason}", param="messages")
            case TemplateFailed():
                raise _failure(reply.reason)

    def close(self) -> None:
        """End all processes that are idle; later calls start new ones."""
        self._processes.close()


def _failure(problem: str) -> ChatTemplateError:
    return ChatTemplateError(
        f"the model's chat template {problem}. If a shorter conversation fails too, correct the template: "
        "chat_template.jinja, or chat_template in tokenizer_config.json"
    )
