"""Mistral: [TOOL_CALLS] and either a JSON list of calls, or NAME[ARGS]{...} for each call, of some models with
[CALL_ID]ID before [ARGS].
"""

from __future__ import annotations

from typing import Final

from moeflow.text.answer_form.lark import LarkWriter
from moeflow.text.tool_syntax.events import Arguments, CallBegun
from moeflow.text.tool_syntax.json_call import json_call
from moeflow.text.tool_syntax.json_values import json_pieces
from moeflow.text.tool_syntax.marked_calls import marked_calls
from moeflow.text.tool_syntax.reader import Reader, Steps
from moeflow.text.tool_syntax.tool import Tool, Tools
from moeflow.text.tool_syntax.written_call import WrittenCall, json_arguments

BEGIN, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
MAX_NAME_CHARS: Final = 256


def write_named(lark: LarkWriter, tool: Tool) -> WrittenCall:
    """Return a call as it has to be written by models that have a token for ARGS."""
    return WrittenCall(f"{BEGIN}{tool.name}{ARGS}", json_arguments(lark, tool))


def write_listed(lark: LarkWriter, tool: Tool) -> WrittenCall:
    """Return a call as it has to be written in the list of them."""
    return WrittenCall(f'{{"name": "{tool.name}", "arguments": ', json_arguments(lark, tool), "}")


def read(reader: Reader, tools: Tools) -> Steps[None]:
    """Yield what an answer says and calls."""
    return marked_calls(reader, (BEGIN,), lambda _: _calls(reader))


def _calls(reader: Reader) -> Steps[bool]:
    yield from reader.skip_space()
    char = yield from reader.char()
    return (yield from (_list(reader) if char == "[" else json_call(reader) if char == "{" else _named(reader)))


def _list(reader: Reader) -> Steps[bool]:
    reader.skip()
    is_call = False
    while (yield from json_call(reader)):
        is_call = True
        yield from reader.skip_space()
        if not (yield from reader.takes(",")):
            yield from reader.takes("]")
            break
    return is_call


def _named(reader: Reader) -> Steps[bool]:
    found = yield from reader.whole_until((CALL_ID, ARGS, "{"), MAX_NAME_CHARS)
    if found is None or not (name := found[0].strip()):
        return False
    marker = found[1]
    if marker == CALL_ID:  # clients get ids of our own
        found = yield from reader.whole_until((ARGS,), MAX_NAME_CHARS)
        if found is None:
            return False
    elif marker == "{":
        reader.skip(-1)
    yield CallBegun(name)
    yield from reader.skip_space()
    yield from json_pieces(reader, Arguments)
    return True
