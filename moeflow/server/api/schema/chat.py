"""What `/v1/chat/completions` takes and gives, in OpenAI's words."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, model_validator

from moeflow.core.sampling_params import MAX_LOGPROBS, SamplingParams
from moeflow.server.api.logprobs import ChatLogprobs
from moeflow.server.api.schema.field_rules import Rule, needs_true, not_all
from moeflow.server.api.schema.sampling_fields import MaxTokens, SamplingFields
from moeflow.server.api.schema.strict_model import StrictModel, Unsupported, one_of, refusal
from moeflow.server.api.schema.token_trees import TokenTrees
from moeflow.server.api.usage import Usage

_NO_TOOLS = "this server calls no tools"
_IGNORED = "Accepted; changes nothing."


class TextPart(StrictModel):
    """A piece of a message."""

    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _check_type(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise refusal("type", f"content parts of type {kind[:80]!r} are not supported: the model reads text only")
        return data


class ChatMessage(StrictModel):
    """One turn of the conversation."""

    unsupported: ClassVar[dict[str, Unsupported]] = {
        "tool_calls": Unsupported(_NO_TOOLS, ([],)),
        "tool_call_id": Unsupported(_NO_TOOLS),
        "function_call": Unsupported(_NO_TOOLS),
        "audio": Unsupported("the model takes and returns text only"),
        "refusal": Unsupported("put the text into content", ("",)),
        "annotations": Unsupported("the model reads text only", ([],)),
    }

    role: Literal["system", "developer", "user", "assistant"] = Field(
        description="developer is another word for system."
    )
    content: Annotated[
        str | Annotated[list[TextPart], Field(fail_fast=True)], one_of("a string or a list of text parts")
    ]
    name: str | None = Field(None, description="For chat templates that show it.")

    def plain(self) -> dict[str, Any]:
        """Return the message as chat templates take it."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        message = {"role": "system" if self.role == "developer" else self.role, "content": content}
        return message if self.name is None else message | {"name": self.name}


class ChatRequest(SamplingFields):
    """Answer in a conversation."""

    unsupported: ClassVar[dict[str, Unsupported]] = {
        "tools": Unsupported(_NO_TOOLS, ([],)),
        "tool_choice": Unsupported(_NO_TOOLS, ("none", "auto")),
        "functions": Unsupported(_NO_TOOLS, ([],)),
        "function_call": Unsupported(_NO_TOOLS, ("none", "auto")),
        "response_format": Unsupported("the form of answers cannot be enforced", ({"type": "text"},)),
        "modalities": Unsupported("answers are text", (["text"], [])),
        "audio": Unsupported("answers are text"),
        "moderation": Unsupported("nothing is moderated here"),
        "reasoning_effort": Unsupported("the model does not reason apart from its answer", ("none",)),
        "verbosity": Unsupported("state in a message how long the answer should be", ("medium",)),
        "web_search_options": Unsupported("this server does not search the web"),
    }
    rules: ClassVar[tuple[Rule, ...]] = (
        *SamplingFields.rules,
        needs_true("top_logprobs", "logprobs"),
        not_all(
            "max_tokens",
            "give max_tokens or max_completion_tokens, not both",
            {"max_tokens": (None,), "max_completion_tokens": (None,)},
        ),
    )

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: MaxTokens = Field(None, description="The newer name of max_tokens.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    store: bool | None = Field(None, description=_IGNORED)
    service_tier: str | None = Field(None, description=_IGNORED)
    safety_identifier: str | None = Field(None, description=_IGNORED)
    prompt_cache_key: str | None = Field(None, description=_IGNORED)
    prompt_cache_retention: str | None = Field(None, description=_IGNORED)
    prompt_cache_options: dict[str, Any] | None = Field(None, description=_IGNORED)
    parallel_tool_calls: bool | None = Field(None, description=_IGNORED)
    prediction: dict[str, Any] | None = Field(None, description=_IGNORED)

    def plain_messages(self) -> list[dict[str, Any]]:
        """Return the conversation as chat templates take it."""
        return [message.plain() for message in self.messages]

    def to_sampling_params(self) -> SamplingParams:
        """Return what the engine should do. Raises: RequestError, naming the field."""
        return self.sampling_params(
            max_tokens=self.max_completion_tokens if self.max_tokens is None else self.max_tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )


class AnswerMessage(BaseModel):
    """The answer of the model."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]
    token_trees: TokenTrees = None


class ChatResponse(BaseModel):
    """All answers."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(BaseModel):
    """What is new in an answer: its role first, then text, then nothing more."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    refusal: None = None


class ChatChunkChoice(BaseModel):
    """What a pass added to one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    token_trees: TokenTrees = None


class ChatChunk(BaseModel):
    """One event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
