"""Llama 3: the answer is {"name": ..., "parameters": {...}}, perhaps behind <|python_tag|>; ";" is between several."""

from __future__ import annotations

from moeflow.text.answer_form.lark import LarkWriter
from moeflow.text.tool_syntax.events import Content
from moeflow.text.tool_syntax.json_call import json_call
from moeflow.text.tool_syntax.reader import Reader, Steps
from moeflow.text.tool_syntax.tool import Tool, Tools
from moeflow.text.tool_syntax.written_call import WrittenCall, json_arguments

TAG = "<|python_tag|>"


def write(lark: LarkWriter, tool: Tool) -> WrittenCall:
    """Return a call as it has to be written."""
    return WrittenCall(f'{{"name": "{tool.name}", "parameters": ', json_arguments(lark, tool), "}")


def read(reader: Reader, tools: Tools) -> Steps[None]:
    """Yield what an answer says and calls. JSON that names no tool is an answer like any other."""
    yield from reader.skip_space()
    marker: str | None = TAG if (yield from reader.takes(TAG)) else ""
    while marker is not None:
        place = reader.place
        if not (yield from json_call(reader, tools.__contains__)):
            reader.go_back(place if marker else 0)
            if marker:
                yield Content(marker)
        else:
            yield from reader.skip_space()
            if (yield from reader.takes(";")):
                continue
        reader.forget()
        marker = yield from reader.text_until((TAG,), Content)
