"""Qwen3-Coder and Qwen3.5: <tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>.

Values stand plainly on lines of their own. The outer marker is sometimes forgotten by models.
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
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
LINE: Final = "\n"
MAX_NAME_CHARS: Final = 256


def write(lark: LarkWriter, tool: Tool) -> WrittenCall:
    """Return a call as it has to be written."""
    parts: list[str] = []
    end = f"\n{END_PARAMETER}\n"
    if takes_any(tool):
        parts.append(f"({lark.text(PARAMETER)} {ANY_KEY} {lark.text(f'>{LINE}')} {lark.text_until(end)})*")
    for key, schema, is_required in arguments_of(tool):
        value = written_value(lark, tool, key, schema, end)
        part = f"{lark.text(f'{PARAMETER}{key}>{LINE}')} {value}"
        parts.append(part if is_required else f"({part})?")
    return WrittenCall(f"{BEGIN}\n{FUNCTION}{tool.name}>\n", " ".join(parts), f"{END_FUNCTION}\n{END}")


def read(reader: Reader, tools: Tools) -> Steps[None]:
    """Yield what an answer says and calls."""
    markers = (f"\n{BEGIN}", BEGIN, f"\n{FUNCTION}", FUNCTION)
    return marked_calls(
        reader, markers, lambda marker: _call(reader, tools, has_function=marker.endswith(FUNCTION)), END
    )


def _call(reader: Reader, tools: Tools, *, has_function: bool) -> Steps[bool]:
    if not has_function:
        yield from reader.skip_space()
        if not (yield from reader.takes(FUNCTION)):
            return False
    found = yield from reader.whole_until((">",), MAX_NAME_CHARS)
    if found is None or not (name := found[0].strip()):
        return False
    yield CallBegun(name)
    is_first = True
    while True:
        yield from reader.skip_space()
        if not (yield from reader.takes(PARAMETER)):
            break
        found = yield from reader.whole_until((">",), MAX_NAME_CHARS)
        if found is None:
            return True
        key = found[0].strip()
        yield key_of(key, is_first=is_first)
        is_first = False
        yield from reader.takes("\n")
        if not (
            yield from value_until(
                reader, (f"\n{END_PARAMETER}", END_PARAMETER), tools.arguments(name).property(key).values
            )
        ):
            return True
    if (yield from reader.takes(END_FUNCTION)):
        yield Arguments("{}" if is_first else "}")
    return True
