"""A request of any conversation API to a model, and how to read its answer.

Chat, responses and messages are ways to write this down; here it becomes a generation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from moeflow.core.sampling_params import SamplingParams
from moeflow.engine.generator import Generator
from moeflow.server.api.conversation.continuation import check_free
from moeflow.server.api.conversation.conversation_grammar import grammar_of
from moeflow.server.api.conversation.tool_choice import ToolChoice
from moeflow.server.api.schema.left_out import leave_out
from moeflow.server.generation import Generation, Prepared, start_generation
from moeflow.server.served_model import ServedModel
from moeflow.server.service import Service
from moeflow.text.answer_form.answer_grammar import can_limit_reasoning
from moeflow.text.answer_form.form import Form
from moeflow.text.answer_reader import AnswerReader
from moeflow.text.output_text import TextDelta
from moeflow.text.tokenizer import Tokenizer
from moeflow.text.tool_syntax.events import Arguments, CallBegun, Content, Event, Reasoning


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A conversation, and what its next message is to be."""

    messages: Sequence[Mapping[str, Any]]  # as chat templates take them
    tools: ToolChoice
    variables: Mapping[str, Any] = field(default_factory=dict)  # that the chat template may use beside these
    sampling: SamplingParams
    form: Form | None = None  # of text for the user
    form_field: str = "response_format"  # the request's field with the form
    max_reasoning_tokens: int | None = None
    limits_if_possible: bool = False  # whether the limit is left out where the model's reasoning has no end token
    earlier_token_ids: Sequence[int] = ()  # that the prompt begins with
    begun: str | None = None  # the text of the last message, which the answer continues; None: it is a new message


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """How answers to one request are read."""

    make_reader: Callable[[], AnswerReader | None]  # for each choice; None: text for the user, as it stands
    make_id: Callable[[], str]  # of calls
    is_parallel: bool = True  # whether more than the first call counts


class AnswerEvents:
    """What one choice turns out to be, from its deltas."""

    def __init__(self, form: AnswerForm) -> None:
        self._reader = form.make_reader()
        self._max_calls = None if form.is_parallel else 1
        self._num_uncertain_tokens = 0  # whose text did not become certain yet
        self.num_calls = 0
        self.num_reasoning_tokens = 0  # markers around it left out

    def read(self, delta: TextDelta) -> list[Event]:
        """Return what became certain, but for calls too many."""
        events = self._read(delta)
        self._num_uncertain_tokens += len(delta.token_ids)
        if events:
            self.num_reasoning_tokens += self._num_uncertain_tokens if isinstance(events[0], Reasoning) else 0
            self._num_uncertain_tokens = 0
        return [event for event in events if self._counts(event)]

    @property
    def text_behind(self) -> str:
        """The text that had come behind what became certain last: what it is was not certain."""
        return "" if self._reader is None else self._reader.text_behind

    def _read(self, delta: TextDelta) -> list[Event]:
        if self._reader is None:
            return [Content(delta.text)] if delta.text else []
        events = self._reader.push(delta.text)
        return events + self._reader.finish() if delta.finish_reason is not None else events

    def _counts(self, event: Event) -> bool:
        self.num_calls += isinstance(event, CallBegun)
        is_of_call = isinstance(event, CallBegun | Arguments)
        return not is_of_call or self._max_calls is None or self.num_calls <= self._max_calls


def _reasoning_limit(asked: Conversation, tokenizer: Tokenizer) -> int | None:
    """Return how many tokens of reasoning the grammar allows; None: any.

    A text that was begun is after the reasoning. A model that does not reason keeps to any limit.
    """
    limit = asked.max_reasoning_tokens
    if limit is None or asked.begun is not None or not tokenizer.chat_format.can_reason:
        return None
    if asked.limits_if_possible and not can_limit_reasoning(tokenizer):
        leave_out("limit of reasoning")
        return None
    return limit


async def start_conversation(
    service: Service,
    served: ServedModel,
    request_id: str,
    asked: Conversation,
    *,
    is_batch: bool = False,
    client: str | None = None,
) -> tuple[Generation, AnswerForm]:
    """Check and admit a request; the work begins when the generation is iterated. `served` as for `start_generation`.

    Raises: ApiError, RequestError, ChatTemplateError.
    """
    forms: list[AnswerForm] = []
    is_begun = asked.begun is not None
    if is_begun:
        check_free(
            has_form=asked.form is not None, form_field=asked.form_field, is_constrained=asked.tools.is_constrained
        )

    async def prepare(generator: Generator) -> Prepared:
        prompt = await generator.encode_chat(
            asked.messages, asked.tools.tools, asked.variables, continues_last=is_begun
        )
        chat_format = generator.tokenizer.chat_format
        make_reader = partial(
            chat_format.reader, asked.tools.tools, is_reasoning=prompt.is_reasoning, begun=asked.begun
        )
        forms.append(AnswerForm(make_reader, chat_format.syntax.make_id, asked.tools.is_parallel))
        grammar = await grammar_of(
            generator,
            asked.tools,
            asked.form,
            form_field=asked.form_field,
            max_reasoning_tokens=_reasoning_limit(asked, generator.tokenizer),
            is_reasoning=prompt.is_reasoning,
            client=client,
        )
        shown = generator.tokenizer.special_ids_of(chat_format.markers(asked.tools.tools))
        token_ids = [*asked.earlier_token_ids, *prompt.token_ids]
        return Prepared([token_ids], replace(asked.sampling, grammar=grammar), shown)

    generation = await start_generation(service, served, request_id, prepare, asked.sampling.n, is_batch=is_batch)
    (form,) = forms
    return generation, form
