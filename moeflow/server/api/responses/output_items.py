"""Items that `/v1/responses` gives: output of the model, and lists of a stored response's input."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from moeflow.server.api.logprobs import TokenLogprob
from moeflow.server.api.responses.response_items import ItemStatus, SummaryText


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
    encrypted_content: str | None = None


class OutputCall(BaseModel):
    """A function that the model calls."""

    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str


class OutputCustomCall(BaseModel):
    """A custom tool that the model calls."""

    id: str
    type: Literal["custom_tool_call"]
    status: ItemStatus
    call_id: str
    name: str
    namespace: str | None = None
    input: str


class OutputShellAction(BaseModel):
    """A command."""

    type: Literal["exec"]
    command: list[str]
    env: dict[str, str]
    timeout_ms: int | None = None
    user: str | None = None
    working_directory: str | None = None


class OutputShellCall(BaseModel):
    """A command that the model wants to run in the user's shell."""

    id: str
    type: Literal["local_shell_call"]
    status: ItemStatus
    call_id: str
    action: OutputShellAction


class OutputSearchCall(BaseModel):
    """A search for tools."""

    id: str
    type: Literal["tool_search_call"]
    status: ItemStatus
    call_id: str | None
    execution: Literal["server", "client"]
    arguments: Any


OutputItem = OutputMessage | OutputReasoning | OutputCall | OutputCustomCall | OutputShellCall | OutputSearchCall


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
    type: Literal["function_call_output", "custom_tool_call_output", "local_shell_call_output"]
    status: ItemStatus
    call_id: str
    output: str


class ListedTools(BaseModel):
    """Tools that come with a conversation."""

    id: str
    type: Literal["additional_tools", "tool_search_output"]
    status: ItemStatus
    call_id: str | None = None
    execution: Literal["server", "client"] | None = None
    role: Literal["developer"] | None = None
    tools: list[dict[str, Any]]


class ListedAgentMessage(BaseModel):
    """A message from one of the client's agents to another."""

    id: str
    type: Literal["agent_message"]
    status: ItemStatus
    author: str
    recipient: str
    content: list[ListedText]


ListedItem = ListedMessage | ListedResult | ListedTools | ListedAgentMessage | OutputItem
