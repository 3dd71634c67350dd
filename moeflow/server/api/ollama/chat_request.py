"""What `/api/chat` takes."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field

from moeflow.server.api.conversation.continuation import begun_text
from moeflow.server.api.conversation.conversation import Conversation
from moeflow.server.api.ollama.call_ids import with_call_ids
from moeflow.server.api.ollama.generating_request import GeneratingRequest
from moeflow.server.api.schema.sampling_fields import IGNORED
from moeflow.server.api.schema.strict_model import StrictModel
from moeflow.server.api.schema.tools import MAX_TOOLS, NAMES_OF_TOOLS, ToolDefinition, tool_wish


class OllamaCalledFunction(StrictModel):
    """A function and the arguments of its call."""

    name: str
    arguments: dict[str, Any] | None = None
    index: int | None = Field(None, description=IGNORED)


class OllamaCall(StrictModel):
    """A call in an earlier message."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: OllamaCalledFunction

    def plain(self) -> dict[str, Any]:
        """Return it as chat templates take it."""
        arguments = json.dumps(self.function.arguments or {}, ensure_ascii=False)
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


class OllamaMessage(StrictModel):
    """One turn of the conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = Field(None, description="The model's reasoning before this answer.")
    tool_calls: Annotated[list[OllamaCall], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_name: str | None = Field(None, description="The tool that this is a result of.")
    tool_call_id: str | None = Field(None, description="The call that this is the result of.")

    def plain(self) -> dict[str, Any]:
        """Return the message as chat templates take it, calls and results still without ids."""
        others = {
            "reasoning_content": self.thinking or None,
            "tool_calls": [call.plain() for call in self.tool_calls or ()] or None,
            "name": self.tool_name,
            "tool_call_id": self.tool_call_id,
        }
        given = {key: value for key, value in others.items() if value is not None}
        return {"role": self.role, "content": self.content or "", **given}


class OllamaChatRequest(GeneratingRequest):
    """Answer in a conversation."""

    messages: list[OllamaMessage] | None = Field(None, description="None: the model is loaded, nothing generated.")
    tools: Annotated[list[ToolDefinition], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = Field(
        None, description=NAMES_OF_TOOLS
    )

    def conversation(self) -> Conversation:
        """Return the request in the form that all APIs share. The answer continues an assistant's last message.

        Raises: RequestError, naming the field.
        """
        messages = with_call_ids([message.plain() for message in self.messages or ()])
        last = messages[-1] if messages else {"role": "user"}
        is_begun = last["role"] == "assistant" and not last.get("tool_calls")
        return Conversation(
            messages=messages,
            begun=begun_text(messages) if is_begun else None,
            tools=tool_wish(self.tools or (), None, is_parallel=True),
            sampling=self.to_sampling_params(),
            variables=self.thinking_variables(),
            form=self.form(),
            form_field="format",
        )
