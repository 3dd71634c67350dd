"""What `/v1/chat/completions` takes and gives, in OpenAI's words."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, Field, Tag, model_validator

from moeflow.core.sampling_params import MAX_LOGPROBS
from moeflow.server.api.conversation.continuation import ContinuationFields
from moeflow.server.api.conversation.conversation import Conversation
from moeflow.server.api.conversation.turns import named_results
from moeflow.server.api.logprobs import ChatLogprobs
from moeflow.server.api.prompt_progress import Progress
from moeflow.server.api.schema.field_rules import Rule, needs_true
from moeflow.server.api.schema.images import UnreadPart, check_parts
from moeflow.server.api.schema.sampling_fields import MaxTokens, SamplingFields
from moeflow.server.api.schema.strict_model import StrictModel, one_of
from moeflow.server.api.schema.tagged import by_type, known_types
from moeflow.server.api.schema.template_fields import ReasoningEffort, TemplateFields, ThinkingBudget
from moeflow.server.api.schema.token_trees import TokenTrees
from moeflow.server.api.schema.tools import (
    CHOICE_OF_TOOLS,
    MAX_TOOLS,
    NAMES_OF_TOOLS,
    AnsweredCall,
    CallDelta,
    ToolCall,
    ToolChoiceField,
    ToolDefinition,
    tool_wish,
)
from moeflow.server.api.timings import Timings
from moeflow.server.api.usage import TokenUsage

_OLD = "it is the older form of tools"
_CALLS = "tool_calls"
_WITHOUT_CONTENT = ("assistant", "tool")
_NO_CONTENT = Rule(
    "content",
    "Field required: only messages of an assistant or a tool may be without content",
    lambda fields: fields["content"] is not None or fields["role"] in _WITHOUT_CONTENT,
    {
        "anyOf": [
            {"required": ["content"], "properties": {"content": {"type": ["string", "array"]}}},
            {"properties": {"role": {"enum": [*_WITHOUT_CONTENT]}}},
        ]
    },
)
_CALLS_OF_ASSISTANTS = Rule(
    _CALLS,
    "only an assistant's message has tool_calls",
    lambda fields: fields["role"] == "assistant" or not fields[_CALLS],
    {
        "anyOf": [
            {"properties": {"role": {"const": "assistant"}}},
            {"properties": {_CALLS: {"type": ["array", "null"], "maxItems": 0}}},
        ]
    },
)
_RESULTS_OF_CALLS = Rule(
    "tool_call_id",
    "a message of role tool needs tool_call_id, and no other has one",
    lambda fields: (fields["role"] == "tool") == (fields["tool_call_id"] is not None),
    {
        "anyOf": [
            {
                "required": ["tool_call_id"],
                "properties": {"role": {"const": "tool"}, "tool_call_id": {"type": "string"}},
            },
            {"properties": {"role": {"not": {"const": "tool"}}, "tool_call_id": {"type": "null"}}},
        ]
    },
)


def _is_none(value: Any) -> bool:
    return value is None


class TextPart(StrictModel):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class ImagePart(UnreadPart):
    """An image."""

    type: Literal["image_url"]
    image_url: str | dict[str, Any]


ContentPart = Annotated[
    Annotated[TextPart, Tag("<text>")] | Annotated[ImagePart, Tag("<image_url>")],
    by_type(),
    known_types(
        "content parts", ("text", "image_url"), dict.fromkeys(("input_audio", "file"), "the model reads text only")
    ),
]


class ChatMessage(StrictModel):
    """One turn of the conversation."""

    rules: ClassVar[tuple[Rule, ...]] = (_NO_CONTENT, _CALLS_OF_ASSISTANTS, _RESULTS_OF_CALLS)

    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(
        description="developer is another word for system."
    )
    content: Annotated[
        str | Annotated[list[ContentPart], Field(fail_fast=True)] | None, one_of("a string or a list of text parts")
    ] = None
    name: str | None = Field(None, description="For chat templates that show it.")
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_call_id: str | None = Field(None, description="Of the call that this is the result of.")
    reasoning_content: str | None = Field(None, description="What the model said to itself before this answer.")

    @model_validator(mode="after")
    def _check_images(self) -> Self:
        check_parts("content", self.content, is_result=self.role == "tool")
        return self

    def plain(self) -> dict[str, Any]:
        """Return the message as chat templates take it."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())
        message = {"role": "system" if self.role == "developer" else self.role, "content": content}
        others = {
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning_content,
            "tool_calls": [call.plain() for call in self.tool_calls or ()] or None,
        }
        return message | {key: value for key, value in others.items() if value is not None}


class ChatRequest(SamplingFields, TemplateFields, ContinuationFields):
    """Answer in a conversation."""

    rules: ClassVar[tuple[Rule, ...]] = (
        *SamplingFields.rules,
        needs_true("top_logprobs", "logprobs"),
        CHOICE_OF_TOOLS,
    )

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: MaxTokens = Field(
        None, description="The newer name of max_tokens; counts where both are given."
    )
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    tools: Annotated[list[ToolDefinition], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = Field(
        None, description=NAMES_OF_TOOLS
    )
    tool_choice: ToolChoiceField | None = Field(None, description="auto, if there are tools, unless set.")
    parallel_tool_calls: bool | None = Field(None, description="Several calls in one answer; true unless set.")
    reasoning_effort: ReasoningEffort | None = Field(
        None, description="For chat templates that know it; none also switches off reasoning that can be."
    )
    thinking_token_budget: ThinkingBudget | None = Field(
        None, description="Tokens of reasoning at most, for models that reason; then the answer begins."
    )

    def conversation(self) -> Conversation:
        """Return the conversation, in the form that all APIs share. Raises: RequestError, naming the field."""
        messages = named_results([message.plain() for message in self.messages], "messages")
        return Conversation(
            messages=messages,
            tools=tool_wish(self.tools or (), self.tool_choice, is_parallel=self.parallel_tool_calls is not False),
            sampling=self.choice_params(
                max_tokens=self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens,
                logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            ),
            variables=self.template_variables(self.reasoning_effort),
            form=self.answer_form(),
            max_reasoning_tokens=self.thinking_token_budget,
            begun=self.begun(messages),
        )


class AnswerMessage(BaseModel):
    """The answer of the model."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[AnsweredCall] | None = Field(None, exclude_if=_is_none)
    reasoning_content: str | None = Field(
        None, exclude_if=_is_none, description="What the model said to itself before, if it does so."
    )


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    token_trees: TokenTrees = None


class ChatResponse(BaseModel):
    """All answers."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: TokenUsage
    timings: Timings = None


class ChatDelta(BaseModel):
    """A delta of an answer: the role first, then reasoning, text and calls, then an empty one."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    refusal: None = None
    tool_calls: list[CallDelta] | None = None
    reasoning_content: str | None = None


class ChatChunkChoice(BaseModel):
    """What a pass added to one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    token_trees: TokenTrees = None


class ChatChunk(BaseModel):
    """One event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: TokenUsage | None = None
    prompt_progress: Progress = None
    timings: Timings = None
