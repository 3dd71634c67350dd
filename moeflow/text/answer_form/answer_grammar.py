"""The grammar of a whole answer: reasoning, then calls of tools, then text or the form that it must have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from moeflow.core.errors import RequestError
from moeflow.text.answer_form.form import Form
from moeflow.text.answer_form.lark import ANY_TEXT, LarkWriter
from moeflow.text.chat_format import ChatFormat
from moeflow.text.tokenizer import Tokenizer
from moeflow.text.tool_syntax.tool import Tool
from moeflow.text.tool_syntax.written_call import WrittenCall

_SPACE: Final = r"/[ \n]{0,4}/"  # between reasoning and what follows


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerWish:
    """What an answer in a conversation has to be."""

    form: Form | None = None  # of text for the user
    tools: Sequence[Tool] = ()  # that may be called, each as its arguments are described
    must_call: bool = False
    is_parallel: bool = True  # several calls
    max_reasoning_tokens: int | None = None


def answer_grammar(tokenizer: Tokenizer, wish: AnswerWish, *, is_reasoning: bool) -> str:
    """Return the grammar of an answer in a conversation. `is_reasoning`: the prompt has begun the model's reasoning.

    Raises: RequestError if the model's way to call or to reason does not allow for it.
    """
    chat_format = tokenizer.chat_format
    lark = LarkWriter(chat_format.all_markers, tokenizer.added_id)
    reasoning = _reasoning(lark, chat_format, wish.max_reasoning_tokens, is_reasoning=is_reasoning)
    return lark.grammar(f"{reasoning} {_said(lark, chat_format, wish)}")


def can_limit_reasoning(tokenizer: Tokenizer) -> bool:
    """Return whether the model reasons apart from its answer, and a token of its own ends the reasoning."""
    begin, end = _reasoning_marks(tokenizer.chat_format)
    return bool(begin) and tokenizer.added_id(end) is not None


def plain_grammar(form: Form) -> str:
    """Return the grammar of a text that has a form, and nothing around it."""
    lark = LarkWriter((), lambda text: None)
    return lark.grammar(lark.form(form))


def _reasoning_marks(chat_format: ChatFormat) -> tuple[str, str]:
    """Return the texts before and behind the reasoning; both empty: there is none."""
    if chat_format.reasoning is not None:
        return chat_format.reasoning.begin, chat_format.reasoning.end
    begin, end, _ = chat_format.syntax.reasoning
    return begin, end


def _reasoning(lark: LarkWriter, chat_format: ChatFormat, max_tokens: int | None, *, is_reasoning: bool) -> str:
    begin, end = _reasoning_marks(chat_format)
    behind = chat_format.syntax.reasoning[2]
    if not begin:
        return ""
    try:
        rest = f"{lark.text_until(end, max_tokens)} {lark.text(behind) or _SPACE}"
    except ValueError as error:
        raise RequestError(f"reasoning cannot be limited: {error}", param="thinking_token_budget") from None
    return rest if is_reasoning else f"({lark.text(begin)} {rest})?"


def _said(lark: LarkWriter, chat_format: ChatFormat, wish: AnswerWish) -> str:
    """Return the expression for what follows the reasoning."""
    text_head = lark.text(chat_format.syntax.text_head)
    form = None if wish.form is None else f"{text_head} {lark.form(wish.form)}"
    if not wish.tools:
        return lark.anything() if form is None else form
    written = [_written(lark, chat_format, tool) for tool in wish.tools]
    if wish.must_call or form is not None:
        calls = _calls(lark, chat_format, written, is_parallel=wish.is_parallel)
        return calls if wish.must_call or form is None else f"({calls} | {form})"
    return _calls_in_text(lark, chat_format, written)


def _written(lark: LarkWriter, chat_format: ChatFormat, tool: Tool) -> WrittenCall:
    """Return a call whose arguments are a rule of their own, so that an error about them names the tool."""
    about = f"the arguments of {tool.name!r}"
    try:
        call = chat_format.syntax.write(lark, tool)
    except RequestError as error:
        raise RequestError(f"{about}: {error}", param="tools") from None
    return replace(call, arguments=lark.rule(call.arguments, words=about))


def _calls(lark: LarkWriter, chat_format: ChatFormat, written: Sequence[WrittenCall], *, is_parallel: bool) -> str:
    syntax = chat_format.syntax
    call = lark.rule(" | ".join(f"{lark.text(one.head)} {one.arguments} {lark.text(one.tail)}" for one in written))
    others = f"({lark.text(syntax.between)} {call})*" if is_parallel and not syntax.is_single else ""
    return f"{lark.text(syntax.before)} {call} {others} {lark.text(syntax.after)}"


def _calls_in_text(lark: LarkWriter, chat_format: ChatFormat, written: Sequence[WrittenCall]) -> str:
    """Return the expression for any text with correctly written calls, if it has calls."""
    syntax = chat_format.syntax
    first = syntax.before or ""
    call = lark.rule(
        " | ".join(
            f"{lark.text((first + one.head).removeprefix(syntax.trigger))} {one.arguments} {lark.text(one.tail)}"
            for one in written
        )
    )
    again = lark.rule(" | ".join(f"{lark.text(one.head)} {one.arguments} {lark.text(one.tail)}" for one in written))
    if syntax.name == "llama3":  # whose calls are all of an answer
        return f"({lark.text(syntax.trigger)} {call} ({lark.text(syntax.between)} {again})* | /(?s:[^{{].*)/)?"
    others = f"({lark.text(syntax.between)} {again})*" if syntax.before else ""
    begun = f"{lark.text_until(syntax.trigger)} {call} {others} {lark.text(syntax.after)}"
    if syntax.reads_all:
        said = f"{lark.text(syntax.text_head)} {ANY_TEXT}?"
        return f"({lark.text(syntax.trigger)} {call} | {said})"
    return f"({begun})* {ANY_TEXT}?"
