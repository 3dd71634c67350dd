"""Hermes and Qwen: <tool_call> {"name": ..., "arguments": {...}} </tool_call>, one for each call."""

from __future__ import annotations

from moeflow.text.answer_form.lark import LarkWriter
from moeflow.text.tool_syntax.events import Content
from moeflow.text.tool_syntax.json_call import json_call
from moeflow.text.tool_syntax.reader import Reader, Steps
from moeflow.text.tool_syntax.tool import Tool, Tools
from moeflow.text.tool_syntax.written_call import WrittenCall, json_arguments

BEGIN, END = "<tool_call>", "</tool_call>"


def write(lark: LarkWriter, tool: Tool) -> WrittenCall:
    """Return a call as it has to be written."""
    return WrittenCall(f'{BEGIN}\n{{"name": "{tool.name}", "arguments": ', json_arguments(lark, tool), f"}}\n{END}")


def read(reader: Reader, tools: Tools) -> Steps[None]:
    """Yield what an answer says and calls."""
    while (marker := (yield from reader.text_until((f"\n{BEGIN}", BEGIN), Content))) is not None:
        reader.forget()
        if (yield from json_call(reader)):
            yield from reader.skip_space()
            yield from reader.takes(END)
            yield from reader.skip_space()
        else:
            reader.go_back(0)
            yield Content(marker)
