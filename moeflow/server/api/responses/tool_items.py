"""Items that agents' clients send beside messages and functions: calls of other tools, more tools, other agents."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import Field, Tag, model_validator

from moeflow.server.api.conversation.turns import Turns
from moeflow.server.api.responses.hosted_kinds import HOSTED, HostedItem, item_kinds
from moeflow.server.api.responses.offered_tools import INPUT, LOCAL_SHELL, TOOL_SEARCH, flat_name, flat_names
from moeflow.server.api.responses.response_items import (
    FunctionCall,
    FunctionCallOutput,
    ItemFields,
    Message,
    Part,
    ReasoningItem,
    text_of,
)
from moeflow.server.api.responses.response_tools import ToolDefinitions, dumped_tools
from moeflow.server.api.schema.images import check_parts
from moeflow.server.api.schema.left_out import leave_out
from moeflow.server.api.schema.sampling_fields import IGNORED
from moeflow.server.api.schema.strict_model import StrictModel


class CustomToolCall(ItemFields):
    """A call of a custom tool."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    input: str

    def add_to(self, turns: Turns) -> None:
        """Add it to a conversation."""
        turns.call(self.call_id, flat_name(self.namespace, self.name), _json({INPUT: self.input}))

    def stored(self) -> dict[str, Any]:
        """Return it as it is kept and listed."""
        called = {"name": self.name} if self.namespace is None else {"name": self.name, "namespace": self.namespace}
        return self.kept("ctc", self.type, {"call_id": self.call_id, **called, "input": self.input})


class ShellAction(StrictModel):
    """A command."""

    type: Literal["exec"]
    command: list[str]
    env: dict[str, str] | None = None
    timeout_ms: int | None = None
    user: str | None = None
    working_directory: str | None = None


class LocalShellCall(ItemFields):
    """A command in the user's shell."""

    type: Literal["local_shell_call"]
    call_id: str | None = Field(None, description="The id of the item, unless set.")
    action: ShellAction

    def add_to(self, turns: Turns) -> None:
        """Add it to a conversation."""
        turns.call(self.call_id or self.id or "", LOCAL_SHELL, _json(self._arguments()))

    def stored(self) -> dict[str, Any]:
        """Return it as it is kept and listed."""
        action = {"type": "exec", "env": {}, **self._arguments()}
        return self.kept("lsh", self.type, {"call_id": self.call_id or self.id or "", "action": action})

    def _arguments(self) -> dict[str, Any]:
        given = self.action.model_dump(exclude={"type"}, exclude_none=True)
        return {name: value for name, value in given.items() if name != "env" or value}


class LocalShellCallOutput(ItemFields):
    """The result of a command."""

    type: Literal["local_shell_call_output"]
    call_id: str | None = Field(None, description="The id of the item, unless set.")
    output: str

    def add_to(self, turns: Turns) -> None:
        """Add it to a conversation."""
        turns.result(self.call_id or self.id or "", self.output)

    def stored(self) -> dict[str, Any]:
        """Return it as it is kept and listed."""
        return self.kept("lsho", self.type, {"call_id": self.call_id or self.id or "", "output": self.output})


class ToolSearchCall(ItemFields):
    """A search for tools. The model sees the searches that the client executed."""

    type: Literal["tool_search_call"]
    call_id: str | None = None
    execution: Literal["server", "client"] = "server"
    arguments: Any

    def add_to(self, turns: Turns) -> None:
        """Add it to a conversation."""
        if self.execution == "client" and self.call_id is not None:
            turns.call(self.call_id, TOOL_SEARCH, _json(self.arguments))

    def stored(self) -> dict[str, Any]:
        """Return it as it is kept and listed."""
        found = {"call_id": self.call_id, "execution": self.execution, "arguments": self.arguments}
        return self.kept("tsc", self.type, found)


class ToolSearchOutput(ItemFields):
    """The tools that a search found. The model may call them."""

    type: Literal["tool_search_output"]
    call_id: str | None = None
    execution: Literal["server", "client"] = "server"
    tools: ToolDefinitions

    def add_to(self, turns: Turns) -> None:
        """Add it to a conversation."""
        if self.execution == "client" and self.call_id is not None:
            names = flat_names(self.tools)
            turns.result(self.call_id, f"Found tools: {', '.join(names)}" if names else "Found no tools.")

    def stored(self) -> dict[str, Any]:
        """Return it as it is kept and listed."""
        found = {"call_id": self.call_id, "execution": self.execution, "tools": dumped_tools(self.tools)}
        return self.kept("tso", self.type, found)


class AdditionalTools(ItemFields):
    """More tools for the model."""

    type: Literal["additional_tools"]
    role: Literal["developer"] | None = Field(None, description=IGNORED)
    tools: ToolDefinitions

    def add_to(self, turns: Turns) -> None:
        """Add nothing: the tools are not a part of the messages."""

    def stored(self) -> dict[str, Any]:
        """Return it as it is kept and listed."""
        return self.kept("at", self.type, {"role": "developer", "tools": dumped_tools(self.tools)})


class AgentMessage(ItemFields):
    """A message from one of the client's agents to another."""

    type: Literal["agent_message"]
    author: str
    recipient: str
    content: Annotated[list[Part], Field(fail_fast=True)]

    @model_validator(mode="after")
    def _check_images(self) -> Self:
        check_parts("content", self.content, is_result=False)
        return self

    def add_to(self, turns: Turns) -> None:
        """Add it to a conversation."""
        turns.say("user", f"Message from {self.author} to {self.recipient}:\n{text_of(self.content)}")

    def stored(self) -> dict[str, Any]:
        """Return it as it is kept and listed."""
        content = [{"type": "input_text", "text": text_of(self.content)}]
        return self.kept("amsg", self.type, {"author": self.author, "recipient": self.recipient, "content": content})


_KINDS = item_kinds(
    (
        "message",
        "reasoning",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
        "local_shell_call",
        "local_shell_call_output",
        "tool_search_call",
        "tool_search_output",
        "additional_tools",
        "agent_message",
    )
)
Item = Annotated[
    Annotated[Message, Tag("<message>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[FunctionCall, Tag("<function_call>")]
    | Annotated[FunctionCallOutput, Tag("<function_call_output>")]
    | Annotated[FunctionCallOutput, Tag("<custom_tool_call_output>")]
    | Annotated[CustomToolCall, Tag("<custom_tool_call>")]
    | Annotated[LocalShellCall, Tag("<local_shell_call>")]
    | Annotated[LocalShellCallOutput, Tag("<local_shell_call_output>")]
    | Annotated[ToolSearchCall, Tag("<tool_search_call>")]
    | Annotated[ToolSearchOutput, Tag("<tool_search_output>")]
    | Annotated[AdditionalTools, Tag("<additional_tools>")]
    | Annotated[AgentMessage, Tag("<agent_message>")]
    | Annotated[HostedItem, Tag(HOSTED)],
    _KINDS.discriminator(),
    _KINDS.known({"item_reference": "send the item itself, or previous_response_id"}),
]


def add_item(item: Item, turns: Turns) -> None:
    """Add an item to a conversation, or note that it is left out."""
    if isinstance(item, HostedItem):
        leave_out(f"input ({item.type})")
    else:
        item.add_to(turns)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
