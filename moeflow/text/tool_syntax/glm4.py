"""GLM 4.5 and later: <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...</tool_call>, with or without
line breaks between these. Values stand plainly.
"""

from __future__ import annotations

from typing import Final

from moeflow.text.answer_form.lark import LarkWriter
from moeflow.text.tool_syntax.events import Arguments, CallBegun
from moeflow.text.tool_syntax.marked_calls import marked_calls
from moeflow.text.tool_syntax.plain_value import key_of, value_until
from moeflow.text.tool_syntax.reader import Reader, Steps
from moeflow.text.tool_syntax.tool import Tool, Tools
from moeflow.text.tool_syntax.written_call import WrittenCall
from moeflow.text.tool_syntax.written_values import ANY_KEY, arguments_of, takes_any, written_value

BEGIN, END = "<tool_call>", "</tool_call>"
KEY, END_KEY = "<arg_key>", "</arg_key>"
VALUE, END_VALUE = "<arg_value>", "</arg_value>"
LINE: Final = "\n"
MAX_NAME_CHARS: Final = 256


def write(lark: LarkWriter, tool: Tool) -> WrittenCall:
    """Return a call as it has to be written."""
    parts: list[str] = []
    if takes_any(tool):
        head = f"{lark.text(KEY)} {ANY_KEY} {lark.text(f'{END_KEY}{LINE}{VALUE}')}"
        parts.append(f"({head} {lark.text_until(END_VALUE)} {lark.text(LINE)})*")
    for key, schema, is_required in arguments_of(tool):
        value = written_value(lark, tool, key, schema, END_VALUE)
        part = f"{lark.text(f'{KEY}{key}{END_KEY}{LINE}{VALUE}')} {value} {lark.text(LINE)}"
        parts.append(part if is_required else f"({part})?")
    return WrittenCall(f"{BEGIN}{tool.name}\n", " ".join(parts), END)


def read(reader: Reader, tools: Tools) -> Steps[None]:
    """Yield what an answer says and calls."""
    return marked_calls(reader, (f"\n{BEGIN}", BEGIN), lambda _: _call(reader, tools))


def _call(reader: Reader, tools: Tools) -> Steps[bool]:
    found = yield from reader.whole_until((KEY, END), MAX_NAME_CHARS)
    if found is None or not (name := found[0].strip()) or len(name.split()) > 1:
        return False
    yield CallBegun(name)
    marker, is_first = found[1], True
    while marker == KEY:
        found = yield from reader.whole_until((END_KEY,), MAX_NAME_CHARS)
        yield from reader.skip_space()
        if found is None or not (yield from reader.takes(VALUE)):
            return True
        key = found[0].strip()
        yield key_of(key, is_first=is_first)
        is_first = False
        if not (yield from value_until(reader, (END_VALUE,), tools.arguments(name).property(key).values)):
            return True
        yield from reader.skip_space()
        if not (yield from reader.takes(KEY)):
            break
    if marker == END or (yield from reader.takes(END)):
        yield Arguments("{}" if is_first else "}")
    return True
