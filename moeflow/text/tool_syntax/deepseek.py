"""DeepSeek: CALLS, then CALL ... END_CALL for each call, then END_CALLS, tokens of their own. Between these, V3.1 and
later write NAME, SEPARATOR and the JSON; V3 and R1 "function", SEPARATOR, NAME and the JSON in a fence.
"""

from __future__ import annotations

from typing import Final

from moeflow.text.answer_form.lark import LarkWriter
from moeflow.text.tool_syntax.events import Arguments, CallBegun, Content
from moeflow.text.tool_syntax.json_values import json_pieces
from moeflow.text.tool_syntax.reader import Reader, Steps
from moeflow.text.tool_syntax.tool import Tool, Tools
from moeflow.text.tool_syntax.written_call import WrittenCall, json_arguments

CALLS, END_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"  # noqa: RUF001
CALL, SEPARATOR, END_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"  # noqa: RUF001
_CALLED: Final = f"{CALLS}{CALL}function{SEPARATOR}<name>"
EXAMPLE_FENCED: Final = f'{_CALLED}\n```json\n{{"<name of an argument>": <its value>}}\n```{END_CALL}{END_CALLS}'
EXAMPLE: Final = f'{CALLS}{CALL}<name>{SEPARATOR}{{"<name of an argument>": <its value>}}{END_CALL}{END_CALLS}'
MAX_NAME_CHARS: Final = 256


def write(lark: LarkWriter, tool: Tool) -> WrittenCall:
    """Return a call as V3.1 has to write it."""
    return WrittenCall(f"{CALL}{tool.name}{SEPARATOR}", json_arguments(lark, tool), END_CALL)


def write_fenced(lark: LarkWriter, tool: Tool) -> WrittenCall:
    """Return a call as V3 has to write it."""
    head = f"{CALL}function{SEPARATOR}{tool.name}\n```json\n"
    return WrittenCall(head, json_arguments(lark, tool), f"\n```{END_CALL}")


def read(reader: Reader, tools: Tools) -> Steps[None]:
    """Yield what an answer says and calls."""
    while (marker := (yield from reader.text_until((f"\n{CALLS}", CALLS, CALL, END_CALLS), Content))) is not None:
        reader.forget()
        if marker == CALL:
            if not (yield from _call(reader)):
                reader.go_back(0)
                yield Content(marker)
                continue
            yield from reader.skip_space()
            yield from reader.takes(END_CALL)
        yield from reader.skip_space()


def _call(reader: Reader) -> Steps[bool]:
    found = yield from reader.whole_until((SEPARATOR,), MAX_NAME_CHARS)
    if found is None or not (name := found[0].strip()):
        return False
    yield from reader.skip_space()
    if (yield from reader.char()) != "{":
        found = yield from reader.whole_until(("\n",), MAX_NAME_CHARS)
        if found is None or not (name := found[0].strip()):
            return False
        yield from reader.skip_space()
        yield from reader.takes("```json")
        yield from reader.skip_space()
    yield CallBegun(name)
    if (yield from json_pieces(reader, Arguments)):
        yield from reader.skip_space()
        yield from reader.takes("```")
    return True
