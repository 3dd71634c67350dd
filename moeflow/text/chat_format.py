"""A model's chat format, derived from its template: how tools are described and called, and how it reasons.

Looks at the template's text only; who renders it is `chat_template.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from moeflow.text.answer_reader import AnswerReader
from moeflow.text.reasoning import reasoning_markers_of
from moeflow.text.tool_prompt import HERMES_EXAMPLE, as_plain_turns, with_tools
from moeflow.text.tool_syntax.events import Content
from moeflow.text.tool_syntax.reader import Reader, Steps
from moeflow.text.tool_syntax.syntax import HERMES, syntax_of
from moeflow.text.tool_syntax.tool import Tool, Tools
from moeflow.text.tool_syntax.typed_arguments import with_types

_TOOLS: Final = re.compile(r"\btools\b")


class ChatFormat:
    """The properties of a chat template; "" if the model has none."""

    def __init__(self, template: str) -> None:
        own = syntax_of(template)
        self.syntax = own or HERMES
        self.reasoning = None if self.syntax.reads_all else reasoning_markers_of(template)
        self._describes_tools = own is not None and bool(_TOOLS.search(template))
        self._writes_calls = own is not None
        self._has_system = "system" in template  # or it may refuse messages of that role, as Mixtral's does

    def conversation(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]:
        """Return messages and tools as the template takes them."""
        if not self._writes_calls:
            messages = as_plain_turns(messages)
        if tools and not self._describes_tools:
            example = self.syntax.example or HERMES_EXAMPLE
            return with_tools(messages, tools, example, has_system=self._has_system), ()
        return messages, tools

    @property
    def can_reason(self) -> bool:
        """Whether the model reasons apart from its answer."""
        return self.reasoning is not None or bool(self.syntax.reasoning[0])

    def ends_in_reasoning(self, prompt: str) -> bool:
        """Whether a prompt's end has begun the model's reasoning."""
        return self.reasoning is not None and prompt.rstrip().endswith(self.reasoning.begin.strip())

    def markers(self, tools: Sequence[Tool]) -> tuple[str, ...]:
        """Return the markers between parts of an answer to a request with these tools; they are not shown to the
        user."""
        return self.all_markers if tools or self.syntax.reads_all else self._reasoning_markers

    @property
    def all_markers(self) -> tuple[str, ...]:
        """The markers between parts of any answer."""
        return (*self.syntax.markers, *self._reasoning_markers)

    @property
    def _reasoning_markers(self) -> tuple[str, ...]:
        return () if self.reasoning is None else (self.reasoning.begin.strip(), self.reasoning.end)

    def reader(
        self, tools: Sequence[Tool], *, is_reasoning: bool = False, begun: str | None = None
    ) -> AnswerReader | None:
        """Return who understands an answer; None: it is text for the user, as it stands.

        `is_reasoning`: whether the prompt has begun the model's reasoning. The prompt ends with `begun`, the
        beginning of the answer, unless that is None.
        """
        if not tools and self.reasoning is None and not self.syntax.reads_all:
            return None
        known = Tools(tuple(tools))

        def read(reader: Reader) -> Steps[None]:
            if self.reasoning is not None:
                yield from self.reasoning.read(reader, has_begun=is_reasoning)
            if tools or self.syntax.reads_all:
                yield from with_types(self.syntax.read(reader, known), known)
            else:
                yield from _read_text(reader)

        return AnswerReader(read, begun or "", head="" if begun is None else self.syntax.text_head)


def _read_text(reader: Reader) -> Steps[None]:
    while True:
        text, is_end = reader.unread()
        reader.skip(len(text))
        reader.forget()
        if text:
            yield Content(text)
        if is_end:
            return
        yield None
