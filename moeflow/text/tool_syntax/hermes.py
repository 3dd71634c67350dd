"""Hermes and Qwen: <tool_call> {"name": ..., "arguments": {...}} </tool_call>, one for each call."""

from __future__ import annotations

from moeflow.text.answer_form.lark import LarkWriter
from moeflow.text.tool_syntax.json_call import json_call
from moeflow.text.tool_syntax.marked_calls import marked_calls
from moeflow.text.tool_syntax.reader import Reader, Steps
from moeflow.text.tool_syntax.tool import Tool, Tools
from moeflow.text.tool_syntax.written_call import WrittenCall, json_arguments

BEGIN, END = "<tool_call>", "</tool_call>"


def write(lark: LarkWriter, tool: Tool) -> WrittenCall:
    """Return a call as it has to be written."""
    return WrittenCall(f'{BEGIN}\n{{"name": "{tool.name}", "arguments": ', json_arguments(lark, tool), f"}}\n{END}")


def read(reader: Reader, tools: Tools) -> Steps[None]:
    """Yield what an answer says and calls."""
    return marked_calls(reader, (f"\n{BEGIN}", BEGIN), lambda _: json_call(reader), END)
