"""Checks of text generation that `/v1/completions` and `/v1/chat/completions` share."""

from __future__ import annotations

from functools import partial
from typing import Any

from moeflow.cli.check.area import Area, Check
from moeflow.cli.check.forms import NUM_TOKENS, ChatForm, CompletionForm, Form
from moeflow.cli.check.openai_shapes import ChatCompletion, ChatLogprobs, Completion
from moeflow.cli.check.outcome import Skipped, expect, expect_equal
from moeflow.cli.check.sse import check_done
from moeflow.cli.check.target import Target

_FEW = 4  # tokens
_MIN_TEXT = 6  # characters, so that a stop string fits inside


def required_fields(target: Target, form: Form) -> None:
    """An answer has all required fields, of the right types, and one choice."""
    expect_equal([part.index for part in form.parts(form.ask(target))], [0], "indexes of choices")


def own_ids(target: Target, form: Form) -> None:
    """Two answers have different ids."""
    first, second = form.ask(target, max_tokens=1), form.ask(target, max_tokens=1, again=True)
    expect(first.id != second.id, f"two answers must have different ids, not both {first.id}")


def usage_sums(target: Target, form: Form) -> None:
    """Prompt and completion tokens add up to the total, and more text has more tokens."""
    usage = form.ask(target).usage
    expect_equal(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens, "total_tokens")
    expect(usage.prompt_tokens > 0, "prompt_tokens must be above 0")
    expect(0 < usage.completion_tokens <= NUM_TOKENS, f"completion_tokens must be 1 to {NUM_TOKENS}")


def ends_at_max_tokens(target: Target, form: Form) -> None:
    """An answer has at most max_tokens tokens; it ends with `length` if it would go on."""
    answer = form.ask(target, max_tokens=2)
    num_tokens, (part,) = answer.usage.completion_tokens, form.parts(answer)
    expect(num_tokens <= 2, f"completion_tokens must be at most 2, not {num_tokens}")
    if part.finish_reason == "stop" and num_tokens < NUM_TOKENS:
        expect(form.ask(target).usage.completion_tokens <= 2, "finish_reason must be 'length', not 'stop'")
    else:
        expect_equal(part.finish_reason, "length", "finish_reason")


def ends_before_a_stop_string(target: Target, form: Form) -> None:
    """An answer ends before a stop string, with finish_reason `stop`."""
    text = _repeated_text(target, form)
    stop = text.strip()[2:5]
    (part,) = form.parts(form.ask(target, stop=[stop]))
    expect_equal(part.text, text.partition(stop)[0], f"the text before stop string {stop!r}")
    expect_equal(part.finish_reason, "stop", "finish_reason")


def stream_ends_before_a_stop_string(target: Target, form: Form) -> None:
    """No part of a stop string is streamed."""
    text = _repeated_text(target, form)
    stop = text.strip()[2:5]
    (part,) = form.streamed(form.chunks(target, stop=stop))
    expect_equal(part.text, text.partition(stop)[0], f"the text before stop string {stop!r}")
    expect_equal(part.finish_reason, "stop", "finish_reason")


def several_choices(target: Target, form: Form) -> None:
    """With n=2 an answer has choices 0 and 1."""
    answer = form.ask(target, n=2, max_tokens=_FEW)
    expect_equal(sorted(part.index for part in form.parts(answer)), [0, 1], "indexes of choices")


def several_streamed_choices(target: Target, form: Form) -> None:
    """With n=2 a stream has parts of choices 0 and 1, each with its own end."""
    parts = form.streamed(form.chunks(target, n=2, max_tokens=_FEW))
    expect_equal([part.index for part in parts], [0, 1], "indexes of choices")


def stream_order(target: Target, form: Form) -> None:
    """Chunks have the right framing, fields and order, and end with `[DONE]`."""
    expect(form.chunks(target), "a stream must have chunks")
    check_done(target.stream(form.path, form.body(target)))


def stream_equals_answer(target: Target, form: Form) -> None:
    """The parts of a stream are the text of the same answer without streaming."""
    text = _repeated_text(target, form)
    (part,) = form.streamed(form.chunks(target))
    expect_equal(part.text, text, "the streamed text")
    expect_equal(part.finish_reason, form.parts(form.ask(target))[0].finish_reason, "finish_reason")


def stream_usage(target: Target, form: Form) -> None:
    """With `include_usage` the last chunk has no choices and the counts of the same answer without streaming."""
    last = form.chunks(target, stream_options={"include_usage": True})[-1].usage
    whole = form.ask(target).usage
    assert last is not None  # by the order
    expect_equal(last.total_tokens, last.prompt_tokens + last.completion_tokens, "total_tokens")
    expect_equal(last.prompt_tokens, whole.prompt_tokens, "prompt_tokens")


def same_at_temperature_0(target: Target, form: Form) -> None:
    """With temperature 0 the same request gets the same text."""
    first = _text(target, form)
    expect_equal(_text(target, form, again=True), first, "the text of the second answer")


def same_with_seed(target: Target, form: Form) -> None:
    """With a seed the same request gets the same text."""
    texts = [
        form.parts(form.ask(target, seed=7, temperature=1, max_tokens=_FEW, again=again))[0].text
        for again in (False, True)
    ]
    expect_equal(texts[1], texts[0], "the text of the second answer")


def logprobs(target: Target, form: Form) -> None:
    """Each token of an answer has its log-probability and those of the likeliest tokens."""
    fields: dict[str, Any] = (
        {"logprobs": 2} if isinstance(form, CompletionForm) else {"logprobs": True, "top_logprobs": 2}
    )
    answer = form.ask(target, max_tokens=_FEW, **fields)
    if isinstance(answer, ChatCompletion):
        _check_chat_logprobs(answer.choices[0].logprobs)
    else:
        _check_completion_logprobs(answer)


def _check_chat_logprobs(found: ChatLogprobs | None) -> None:
    expect(found is not None and found.content, "logprobs.content must have the tokens of the answer")
    assert found is not None
    for token in found.content or ():
        expect(
            1 <= len(token.top_logprobs) <= 2, f"top_logprobs must have 1 or 2 tokens, not {len(token.top_logprobs)}"
        )
        best = max(it.logprob for it in token.top_logprobs)
        expect(token.logprob <= best + 1e-3, f"no token may be likelier than its top_logprobs: {token}")


def _check_completion_logprobs(answer: Completion) -> None:
    found = answer.choices[0].logprobs
    expect(found is not None, "logprobs must be there")
    assert found is not None
    lengths = {len(it) for it in (found.tokens, found.token_logprobs, found.top_logprobs, found.text_offset)}
    expect(len(lengths) == 1 and lengths != {0}, f"all lists of logprobs must have one entry a token, not {lengths}")


def _text(target: Target, form: Form, *, again: bool = False) -> str:
    return form.parts(form.ask(target, again=again))[0].text


def _repeated_text(target: Target, form: Form) -> str:
    """Return a text that the server gives every time. Raises: Skipped if it has none."""
    text = _text(target, form)
    if len(text.strip()) < _MIN_TEXT:
        raise Skipped(f"the answer has too little text: {text!r}")
    if _text(target, form, again=True) != text:
        raise Skipped("the server gives another text each time")
    return text


def generation_checks() -> list[Check]:
    """Return the checks of both endpoints."""
    return [
        check for area, form in (("completions", CompletionForm()), ("chat", ChatForm())) for check in _of(area, form)
    ]


def _of(name: str, form: Form) -> list[Check]:
    area = Area(name, form.path)
    source = f"OpenAI API reference: {name}, create"
    plain = (
        *(required_fields, own_ids, usage_sums, ends_at_max_tokens, ends_before_a_stop_string),
        *(stream_order, stream_equals_answer, stream_usage, stream_ends_before_a_stop_string),
    )
    optional = (several_choices, several_streamed_choices, logprobs)
    advice = (same_at_temperature_0, same_with_seed)
    return [
        *(area.check(partial(run, form=form), source) for run in plain),
        *(area.check(partial(run, form=form), source, optional=True) for run in optional),
        *(area.check(partial(run, form=form), f"{source}, seed", optional=True, advice=True) for run in advice),
    ]
