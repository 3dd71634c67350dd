"""Items that `/v1/responses` takes: messages, reasoning, calls of functions and their results."""

from __future__ import annotations

import uuid
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from moeflow.server.api.conversation.turns import Turns
from moeflow.server.api.responses.offered_tools import flat_name
from moeflow.server.api.responses.sealed import plain_or_unsealed, unsealed
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


class SealedText(StrictModel):
    """A text that the client passes on as if it was encrypted."""

    type: Literal["encrypted_content"]
    encrypted_content: str

    @property
    def text(self) -> str:
        """The text, as far as this server can read it."""
        return plain_or_unsealed(self.encrypted_content, "encrypted_content")


Part = Annotated[
    Annotated[InputText, Tag("<input_text>")]
    | Annotated[SealedText, Tag("<encrypted_content>")]
    | Annotated[InputImage, Tag("<input_image>")]
    | Annotated[SaidText, Tag("<output_text>")],
    by_type(),
    known_types(
        "content parts",
        ("input_text", "input_image", "output_text", "encrypted_content"),
        dict.fromkeys(("input_file", "input_audio"), _READS_TEXT),
    ),
]
Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[Part], Field(fail_fast=True), Tag("<list>")], text_or_list()
]


def text_of(content: str | list[InputText | InputImage | SealedText | SaidText]) -> str:
    """Return a content's text."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


class ItemFields(StrictModel):
    """Fields of all items."""

    id: str | None = Field(None, description=IGNORED)
    status: ItemStatus | None = Field(None, description=IGNORED)

    def kept(self, prefix: str, kind: str, fields: dict[str, Any]) -> dict[str, Any]:
        """Return the item as it is stored and listed."""
        status = self.status or "completed"
        return {"id": self.id or f"{prefix}_{uuid.uuid4().hex}", "type": kind, "status": status, **fields}


class Message(ItemFields):
    """What somebody said."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"] = Field(
        description="developer is another word for system."
    )
    content: Content

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
        return self.kept("msg", "message", fields)


class FunctionCall(ItemFields):
    """A call of the model's."""

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: CalledArguments

    def add_to(self, turns: Turns) -> None:
        """Add it to a conversation."""
        turns.call(self.call_id, flat_name(self.namespace, self.name), self.arguments)

    def stored(self) -> dict[str, Any]:
        """Return it as it is kept and listed."""
        called = {"name": self.name} if self.namespace is None else {"name": self.name, "namespace": self.namespace}
        return self.kept("fc", self.type, {"call_id": self.call_id, **called, "arguments": self.arguments})


class ResultObject(StrictModel):
    """A result and whether the call succeeded."""

    content: Content
    success: bool | None = Field(None, description=IGNORED)


def _result_tag(value: Any) -> str:
    if isinstance(value, dict | ResultObject):
        return "<object>"
    return "<list>" if isinstance(value, list) else "<text>"


class FunctionCallOutput(ItemFields):
    """The result of a call of a function or custom tool. Without a call it is text of the client, as of a user."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str | None = Field(None, description="Of an earlier call; null: the client adds the text by itself.")
    output: Annotated[
        Annotated[str, Tag("<text>")]
        | Annotated[list[Part], Field(fail_fast=True), Tag("<list>")]
        | Annotated[ResultObject, Tag("<object>")],
        Discriminator(_result_tag),
    ]
    name: str | None = Field(None, description="Of the tool; shown to the model where there is no call.")
    namespace: str | None = Field(None, description="Of the tool.")

    @property
    def text(self) -> str:
        """The text for the model."""
        text = text_of(self.output.content if isinstance(self.output, ResultObject) else self.output)
        return text if self.call_id is not None or not self.name else f"{flat_name(self.namespace, self.name)}: {text}"

    @model_validator(mode="after")
    def _check_images(self) -> Self:
        output = self.output.content if isinstance(self.output, ResultObject) else self.output
        check_parts("output", output, is_result=True)
        return self

    def add_to(self, turns: Turns) -> None:
        """Add it to a conversation."""
        if self.call_id is None:
            turns.say("user", self.text)
        else:
            turns.result(self.call_id, self.text)

    def stored(self) -> dict[str, Any]:
        """Return it as it is kept and listed."""
        if self.call_id is None:
            return self.kept("msg", "message", {"role": "user", "content": [{"type": "input_text", "text": self.text}]})
        prefix = "fco" if self.type == "function_call_output" else "ctco"
        return self.kept(prefix, self.type, {"call_id": self.call_id, "output": self.text})


class ReasoningText(StrictModel):
    """A piece of reasoning."""

    type: Literal["reasoning_text", "text"]
    text: str


class SummaryText(StrictModel):
    """A piece of a summary of reasoning."""

    type: Literal["summary_text"]
    text: str


class ReasoningItem(ItemFields):
    """What the model said to itself."""

    type: Literal["reasoning"]
    summary: Annotated[list[SummaryText], Field(fail_fast=True)] | None = Field(
        None, description="Taken where there is no content."
    )
    content: Annotated[list[ReasoningText], Field(fail_fast=True)] | None = None
    encrypted_content: str | None = Field(
        None, description="Taken where there is no content. Only this server's own can be read."
    )

    def add_to(self, turns: Turns) -> None:
        """Add it to a conversation."""
        text = self._said() or "".join(part.text for part in self.summary or ())
        if text:
            turns.think(text)

    def stored(self) -> dict[str, Any]:
        """Return it as it is kept and listed."""
        said = self._said()
        content = [{"type": "reasoning_text", "text": said}] if said else []
        return self.kept(
            "rs", self.type, {"summary": [one.model_dump() for one in self.summary or ()], "content": content}
        )

    def _said(self) -> str:
        if self.content or not self.encrypted_content:
            return "".join(part.text for part in self.content or ())
        return unsealed(self.encrypted_content, "reasoning.encrypted_content")
