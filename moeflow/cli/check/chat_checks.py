"""Checks of conversations in `/v1/chat/completions`."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from moeflow.cli.check.area import Area, Check
from moeflow.cli.check.forms import ChatForm
from moeflow.cli.check.outcome import expect, expect_equal
from moeflow.cli.check.target import Target

_FORM = ChatForm()
_NUM_STREAMS = 8
_PART_OF_A_CHARACTER = re.compile("[\ufffd\ud800-\udfff]")
_SIGNS = "Grüße, 日本語 🎉"


def a_whole_conversation(target: Target) -> None:
    """Messages of system, user and assistant, and content in parts, are accepted."""
    messages = [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "the sky?"}]},
        {"role": "assistant", "content": "Blue."},
        {"role": "user", "content": "And grass?"},
    ]
    _FORM.ask(target, messages=messages, max_tokens=4)


def parts_are_their_text(target: Target) -> None:
    """Content in parts is the same prompt as its text."""
    messages = [{"role": "user", "content": [{"type": "text", "text": "Say hello."}]}]
    plain = [{"role": "user", "content": "Say hello."}]
    counts = [_FORM.ask(target, messages=it, max_tokens=1).usage.prompt_tokens for it in (messages, plain)]
    expect_equal(counts[0], counts[1], "prompt_tokens of content in parts")


def max_completion_tokens(target: Target) -> None:
    """`max_completion_tokens` bounds an answer as `max_tokens` does."""
    body = {name: value for name, value in _FORM.body(target).items() if name != "max_tokens"}
    answer = target.ask(_FORM.path, {**body, "max_completion_tokens": 2}, _FORM.whole)
    num_tokens = answer.usage.completion_tokens
    expect(num_tokens <= 2, f"completion_tokens must be at most 2, not {num_tokens}")


def whole_characters(target: Target) -> None:
    """Characters of several bytes are never split between the parts of a stream."""
    schema = {"type": "object", "properties": {"said": {"enum": [_SIGNS]}}, "required": ["said"]}
    response_format = {
        "type": "json_schema",
        "json_schema": {"name": "said", "schema": {**schema, "additionalProperties": False}, "strict": True},
    }
    chunks = _FORM.chunks(target, response_format=response_format, max_tokens=80)
    for chunk in chunks:
        for choice in chunk.choices:
            text = choice.delta.content or ""
            expect(not _PART_OF_A_CHARACTER.search(text), f"{text!r} has part of a character")
    (part,) = _FORM.streamed(chunks)
    expect(_SIGNS in part.text, f"the stream must have {_SIGNS!r}, not {part.text!r}")


def streams_at_once(target: Target) -> None:
    """Each of 8 streams at once has the text that its request gets alone."""
    asks = [f"Write {number} short words about the sea." for number in range(_NUM_STREAMS)]
    bodies: list[dict[str, Any]] = [{"messages": [{"role": "user", "content": ask}], "max_tokens": 6} for ask in asks]
    alone = [_FORM.parts(_FORM.ask(target, **body))[0].text for body in bodies]
    with ThreadPoolExecutor(_NUM_STREAMS) as pool:
        together = list(pool.map(lambda body: _FORM.streamed(_FORM.chunks(target, **body))[0].text, bodies))
    expect_equal(together, alone, "texts of streams at once")


def chat_checks() -> list[Check]:
    """Return the checks."""
    area, source = Area("chat", _FORM.path), "OpenAI API reference: chat, create"
    return [
        area.check(a_whole_conversation, f"{source}, messages"),
        area.check(parts_are_their_text, f"{source}, messages"),
        area.check(max_completion_tokens, f"{source}, max_completion_tokens", optional=True),
        area.check(whole_characters, "OpenAI API reference: chat, streaming", optional=True),
        Area("concurrency", _FORM.path).check(streams_at_once, "OpenAI API reference: chat, streaming", advice=True),
    ]
