"""Items of `/v1/responses`: what goes in (messages, calls, their results, reasoning) and what comes out."""

from __future__ import annotations

import uuid
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, Tag, model_validator

from moeflow.server.api.conversation.turns import Turns
from moeflow.server.api.logprobs import TokenLogprob
from moeflow.server.api.schema.images import UnreadPart, check_parts
from moeflow.server.api.schema.sampling_fields import IGNORED
from moeflow.server.api.schema.strict_model import StrictModel
from moeflow.server.api.schema.tagged import by_type, known_types, text_or_list
from moeflow.server.api.schema.tools import CalledArguments

ItemStatus = Literal["in_progress", "completed", "incomplete"]
_READS_TEXT = "the model reads text only"


class InputText(StrictModel):
    """A piece of what somebody said."""

    type: Literal["input_text"]
    text: str


class InputImage(UnreadPart):
    """An image."""

    type: Literal["input_image"]
    image_url: str | None = None
    file_id: str | None = None
    detail: str | None = Field(None, description=IGNORED)


class SaidText(StrictModel):
    """A piece of what the model said."""

    type: Literal["output_text"]
    text: str


Part = Annotated[
    Annotated[InputText, Tag("<input_text>")]
    | Annotated[InputImage, Tag("<input_image>")]
    | Annotated[SaidText, Tag("<output_text>")],
    by_type(),
    known_types(
        "content parts",
        ("input_text", "input_image", "output_text"),
        dict.fromkeys(("input_file", "input_audio"), _READS_TEXT),
    ),
]
Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[Part], Field(fail_fast=True), Tag("<list>")], text_or_list()
]


def text_of(content: str | list[InputText | InputImage | SaidText]) -> str:
    """Return a content's text."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


class Message(StrictModel):
    """What somebody said."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"] = Field(
        description="developer is another word for system."
    )
    content: Content
    id: str | None = Field(None, description=IGNORED)
    status: ItemStatus | None = Field(None, description=IGNORED)

    @model_validator(mode="after")
    def _check_images(self) -> Self:
        check_parts("content", self.content, is_result=False)
        return self

    def add_to(self, turns: Turns) -> None:
        """Add it to a conversation."""
        turns.say("system" if self.role == "developer" else self.role, text_of(self.content))

    def stored(self) -> dict[str, Any]:
        """Return it as it is kept and listed."""
        is_answer = self.role == "assistant"
        blank = {"type": "output_text", "annotations": [], "logprobs": []} if is_answer else {"type": "input_text"}
        texts = [self.content] if isinstance(self.content, str) else [part.text for part in self.content]
        fields = {"role": self.role, "content": [{**blank, "text": text} for text in texts]}
        return _kept(self.id, "msg", "message", self.status, fields)


class FunctionCall(StrictModel):
    """A call of the model's."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: CalledArguments
    id: str | None = Field(None, description=IGNORED)
    status: ItemStatus | None = Field(None, description=IGNORED)

    def add_to(self, turns: Turns) -> None:
        """Add it to a conversation."""
        turns.call(self.call_id, self.name, self.arguments)

    def stored(self) -> dict[str, Any]:
        """Return it as it is kept and listed."""
        fields = {"call_id": self.call_id, "name": self.name, "arguments": self.arguments}
        return _kept(self.id, "fc", self.type, self.status, fields)


class FunctionCallOutput(StrictModel):
    """What a call returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: Content
    id: str | None = Field(None, description=IGNORED)
    status: ItemStatus | None = Field(None, description=IGNORED)

    @model_validator(mode="after")
    def _check_images(self) -> Self:
        check_parts("output", self.output, is_result=True)
        return self

    def add_to(self, turns: Turns) -> None:
        """Add it to a conversation."""
        turns.result(self.call_id, text_of(self.output))

    def stored(self) -> dict[str, Any]:
        """Return it as it is kept and listed."""
        fields = {"call_id": self.call_id, "output": text_of(self.output)}
        return _kept(self.id, "fco", self.type, self.status, fields)


class ReasoningText(StrictModel):
    """A piece of reasoning."""

    type: Literal["reasoning_text"]
    text: str


class SummaryText(StrictModel):
    """A piece of a summary of reasoning."""

    type: Literal["summary_text"]
    text: str


class Reasoning(StrictModel):
    """What the model said to itself."""

    type: Literal["reasoning"]
    summary: Annotated[list[SummaryText], Field(fail_fast=True)] | None = Field(
        None, description="Taken where there is no content."
    )
    content: Annotated[list[ReasoningText], Field(fail_fast=True)] | None = None
    id: str | None = Field(None, description=IGNORED)
    status: ItemStatus | None = Field(None, description=IGNORED)

    def add_to(self, turns: Turns) -> None:
        """Add it to a conversation."""
        text = "".join(part.text for part in self.content or self.summary or ())
        if text:
            turns.think(text)

    def stored(self) -> dict[str, Any]:
        """Return it as it is kept and listed."""
        fields = {name: [part.model_dump() for part in getattr(self, name) or ()] for name in ("summary", "content")}
        return _kept(self.id, "rs", self.type, self.status, fields)


def _kept(item_id: str | None, prefix: str, kind: str, status: str | None, fields: dict[str, Any]) -> dict[str, Any]:
    return {"id": item_id or f"{prefix}_{uuid.uuid4().hex}", "type": kind, "status": status or "completed", **fields}


_TYPES = ("message", "function_call", "function_call_output", "reasoning")
Item = Annotated[
    Annotated[Message, Tag("<message>")]
    | Annotated[FunctionCall, Tag("<function_call>")]
    | Annotated[FunctionCallOutput, Tag("<function_call_output>")]
    | Annotated[Reasoning, Tag("<reasoning>")],
    by_type("message"),
    known_types("items", _TYPES, {"item_reference": "send the item itself, or previous_response_id"}),
]


class OutputText(BaseModel):
    """What the model says."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprob]


class OutputReasoningText(BaseModel):
    """What the model says to itself."""

    type: Literal["reasoning_text"]
    text: str


class OutputMessage(BaseModel):
    """A message of the model's."""

    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class OutputReasoning(BaseModel):
    """The reasoning before a message."""

    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[SummaryText]
    content: list[OutputReasoningText]


class OutputCall(BaseModel):
    """A function that the model calls."""

    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


OutputItem = OutputMessage | OutputReasoning | OutputCall


class ListedText(BaseModel):
    """A piece of what somebody said."""

    type: Literal["input_text"]
    text: str


class ListedMessage(BaseModel):
    """What somebody but the model said."""

    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["user", "system", "developer"]
    content: list[ListedText]


class ListedResult(BaseModel):
    """What a call returned."""

    id: str
    type: Literal["function_call_output"]
    status: ItemStatus
    call_id: str
    output: str


ListedItem = ListedMessage | ListedResult | OutputItem
