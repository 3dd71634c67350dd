"""gpt-oss: messages in channels. <|channel|>NAME<|message|>TEXT, ended by a marker and begun by <|start|>.

The channel `analysis` is reasoning; a message to functions.NAME is a call; all else is for the user.
"""

from __future__ import annotations

import re
from typing import Final

from moeflow.text.answer_form.lark import LarkWriter
from moeflow.text.tool_syntax.events import Arguments, CallBegun, Content, Reasoning
from moeflow.text.tool_syntax.reader import Reader, Steps, Wrap
from moeflow.text.tool_syntax.tool import Tool, Tools
from moeflow.text.tool_syntax.written_call import WrittenCall, json_arguments

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
ENDS: Final = ("<|end|>", "<|call|>", "<|return|>")
MAX_HEAD_CHARS: Final = 1024
_RECIPIENT: Final = re.compile(r"\bto=functions\.([^\s<]+)")


def write(lark: LarkWriter, tool: Tool) -> WrittenCall:
    """Return a call as it has to be written; the token that ends it ends the answer, too."""
    head = f"{CHANNEL}commentary to=functions.{tool.name} {CONSTRAIN}json{MESSAGE}"
    return WrittenCall(head, json_arguments(lark, tool))


def read(reader: Reader, tools: Tools) -> Steps[None]:
    """Yield what an answer says, thinks and calls. The first message's <|start|> stands in the prompt."""
    is_head = (yield from reader.takes(CHANNEL)) or (yield from reader.takes(" to="))
    reader.go_back(0)
    while True:
        reader.forget()
        found = (yield from reader.whole_until((MESSAGE,), MAX_HEAD_CHARS)) if is_head else None
        if found is not None:
            marker = yield from _message(reader, found[0])
        else:
            if is_head and (yield from reader.takes(CHANNEL)):  # no message comes of it
                yield Content(CHANNEL)
            marker = yield from reader.text_until((CHANNEL, START, *ENDS), Content)
        if marker is None:
            return
        if marker == CHANNEL:
            reader.skip(-len(CHANNEL))
        is_head = marker in (CHANNEL, START) or (yield from reader.takes(START))


def _message(reader: Reader, head: str) -> Steps[str | None]:
    called = _RECIPIENT.search(head)
    wrap: Wrap = Content
    if called is not None:
        yield CallBegun(called[1])
        wrap = Arguments
    elif "analysis" in head:
        wrap = Reasoning
    return (yield from reader.text_until((START, *ENDS), wrap))
