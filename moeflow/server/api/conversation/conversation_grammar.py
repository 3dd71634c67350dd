"""What a conversation asks of its next message, as a grammar that the engine holds it to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from moeflow.core.errors import QueueFullError, RequestError
from moeflow.engine.generator import Generator
from moeflow.server.api.conversation.tool_choice import ToolChoice
from moeflow.text.answer_form.answer_grammar import AnswerWish, answer_grammar
from moeflow.text.answer_form.form import Form, UserGrammar
from moeflow.text.tool_syntax.tool import Tool


async def grammar_of(
    generator: Generator,
    tools: ToolChoice,
    form: Form | None,
    *,
    form_field: str,
    max_reasoning_tokens: int | None,
    is_reasoning: bool,
    client: str | None,
) -> str:
    """Return the grammar of an answer; "": it may be anything.

    `is_reasoning`: whether the prompt has begun the model's reasoning. `form_field`: the request's field with the form.
    Calls that must be made follow the schemas of their tools, and so do calls of strict tools. Other calls follow them
    where that can be done.

    Raises: RequestError if the form, or such a schema, is not supported; QueueFullError if too many forms of the client
    wait.
    """
    if form is None and max_reasoning_tokens is None and not tools.is_constrained:
        return ""
    wish = AnswerWish(
        form=form,
        tools=tuple(_enforced(tools)) if tools.is_constrained or form is not None else (),
        must_call=tools.is_required,
        is_parallel=tools.is_parallel,
        max_reasoning_tokens=max_reasoning_tokens,
    )
    blamed = "tools" if tools.is_required or (tools.is_constrained and form is None) else form_field
    users = form if isinstance(form, UserGrammar) else None
    try:
        return await _checked(generator, wish, users, is_reasoning=is_reasoning, client=client)
    except QueueFullError:
        raise
    except RequestError as error:
        loose = replace(wish, tools=tuple(map(_loosened, wish.tools)))
        if loose == wish:
            raise _blamed(error, blamed) from None
    try:
        return await _checked(generator, loose, users, is_reasoning=is_reasoning, client=client)
    except QueueFullError:
        raise
    except RequestError as error:
        raise _blamed(error, blamed) from None


async def _checked(
    generator: Generator, wish: AnswerWish, users: UserGrammar | None, *, is_reasoning: bool, client: str | None
) -> str:
    write = partial(answer_grammar, generator.tokenizer, wish, is_reasoning=is_reasoning)
    return await generator.checked(write, users, client=client)


def _enforced(tools: ToolChoice) -> Iterator[Tool]:
    """Yield the tools that may be called. All of them are strict where one has to be called."""
    for tool in tools.allowed:
        yield replace(tool, is_strict=True) if tools.is_required else tool


def _loosened(tool: Tool) -> Tool:
    return tool if tool.is_strict else replace(tool, parameters={"type": "object"})


def _blamed(error: RequestError, field: str) -> RequestError:
    """Return the error with the field that it is about."""
    return error if error.param is not None else RequestError(str(error), param=field)
