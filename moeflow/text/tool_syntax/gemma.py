"""Gemma: <|tool_call>call:NAME{KEY:VALUE,...}<tool_call|>, and FunctionGemma with markers of its own.

Keys stand plainly, strings between two of the same marker, without escapes; objects and lists are as in JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from moeflow.text.answer_form.lark import LarkWriter
from moeflow.text.tool_syntax.events import Arguments, CallBegun, Content, Event
from moeflow.text.tool_syntax.json_scanner import MAX_DEPTH, escaped
from moeflow.text.tool_syntax.json_values import json_pieces
from moeflow.text.tool_syntax.plain_value import as_json, key_of
from moeflow.text.tool_syntax.reader import Reader, Steps
from moeflow.text.tool_syntax.tool import Tool, Tools
from moeflow.text.tool_syntax.written_call import WrittenCall
from moeflow.text.tool_syntax.written_values import ANY_KEY, arguments_of, takes_any, written_value

MAX_NAME_CHARS: Final = 256


@dataclass(frozen=True, slots=True)
class Markers:
    """How a model writes it."""

    begin: str
    end: str
    quote: str

    def write(self, lark: LarkWriter, tool: Tool) -> WrittenCall:
        """Return a call as it has to be written. Objects and lists are JSON, which is read as well."""
        required: list[str] = []
        optional: list[str] = []
        if takes_any(tool):
            text = f"{lark.text(self.quote)} {lark.text_until(self.quote)}"
            part = f'{ANY_KEY} ":" ({text} | {lark.json({})})'
            optional.append(f'{part} ("," {part})*')
        for key, schema, is_required in arguments_of(tool):
            is_text = tool.arguments.property(key).values.has_only_strings
            value = written_value(lark, tool, key, schema, self.quote) if is_text else lark.json(schema)
            part = f"{lark.text(f'{key}:{self.quote if is_text else str()}')} {value}"
            (required if is_required else optional).append(part)
        return WrittenCall(f"{self.begin}call:{tool.name}{{", _separated(required, optional), f"}}{self.end}")

    def read(self, reader: Reader, tools: Tools) -> Steps[None]:
        """Yield what an answer says and calls."""
        while (yield from reader.text_until((self.begin,), Content)) is not None:
            reader.forget()
            if (yield from _call(reader, self.quote)):
                yield from reader.skip_space()
                yield from reader.takes(self.end)
                yield from reader.skip_space()
            else:
                reader.go_back(0)
                yield Content(self.begin)


GEMMA4: Final = Markers("<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA: Final = Markers("<start_function_call>", "<end_function_call>", "<escape>")


def _separated(required: Sequence[str], optional: Sequence[str]) -> str:
    """Return the expression for arguments between commas; the optional ones come behind the others."""
    if required:
        return ' "," '.join(required) + "".join(f' ("," {part})?' for part in optional)
    if not optional:
        return ""
    first, *others = optional
    rest = "".join(f' ("," {part})?' for part in others)
    skipped = _separated((), others)
    return f"({first}{rest}" + (f" | {skipped}" if skipped else "") + ")?"


def _call(reader: Reader, quote: str) -> Steps[bool]:
    yield from reader.skip_space()
    if not (yield from reader.takes("call:")):
        return False
    found = yield from reader.whole_until(("{",), MAX_NAME_CHARS)
    if found is None or not (name := found[0].strip()):
        return False
    reader.skip(-1)
    yield CallBegun(name)
    yield from _value(reader, quote, MAX_DEPTH)
    return True


def _value(reader: Reader, quote: str, depth: int) -> Steps[bool]:
    """Yield a value as JSON; return whether it is a whole one."""
    yield from reader.skip_space()
    if (yield from reader.takes(quote)):
        yield Arguments('"')
        is_whole = (yield from reader.text_until((quote,), _in_string)) is not None
        if is_whole:
            yield Arguments('"')
        return is_whole
    char = yield from reader.char()
    if char == '"':
        return (yield from json_pieces(reader, Arguments))
    if char in ("{", "["):
        reader.skip()
        return depth > 0 and (yield from _items(reader, quote, depth - 1, is_object=char == "{"))
    text = ""
    while (char := (yield from reader.char())) not in ("", ",", "}", "]"):
        reader.skip()
        text += char
    if char:
        yield Arguments(as_json(text.strip()))
    return bool(char)


def _items(reader: Reader, quote: str, depth: int, *, is_object: bool) -> Steps[bool]:
    """Yield the contents of an object or a list, and its brackets; the first is already read."""
    end, is_first = "}" if is_object else "]", True
    while True:
        yield from reader.skip_space()
        if (yield from reader.takes(end)):
            yield Arguments(("{}" if is_object else "[]") if is_first else end)
            return True
        if not is_first and not (yield from reader.takes(",")):
            return False
        yield from reader.skip_space()
        if is_object:
            found = yield from reader.whole_until((":",), MAX_NAME_CHARS)
            if found is None:
                return False
            yield key_of(found[0].replace(quote, "").strip().strip('"'), is_first=is_first)
        else:
            yield Arguments("[" if is_first else ", ")
        is_first = False
        if not (yield from _value(reader, quote, depth)):
            return False


def _in_string(text: str) -> Event:
    return Arguments(escaped(text))
