"""What `/v1/messages` takes, in Anthropic's words."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, Tag, model_validator

from moeflow.core.errors import RequestError
from moeflow.core.sampling_params import MAX_STOP_STRINGS, SamplingParams
from moeflow.server.api.conversation.continuation import begun_text
from moeflow.server.api.conversation.conversation import Conversation
from moeflow.server.api.conversation.tool_choice import ToolChoice
from moeflow.server.api.conversation.turns import Turns
from moeflow.server.api.messages.block_types import AssistantMessage, Message
from moeflow.server.api.messages.shown_blocks import TextBlocks, system_text
from moeflow.server.api.messages.typed_tools import OF_MODELS, ServerTool, TypedTool, by_kind, known_kinds
from moeflow.server.api.schema import left_out
from moeflow.server.api.schema.field_rules import Rule
from moeflow.server.api.schema.sampling_fields import SamplerFields, StopString
from moeflow.server.api.schema.strict_model import StrictModel
from moeflow.server.api.schema.tagged import by_type, known_types
from moeflow.server.api.schema.template_fields import TemplateFields
from moeflow.server.api.schema.tools import MAX_TOOLS, NAMES_OF_TOOLS, FunctionName
from moeflow.text.answer_form.form import JsonForm
from moeflow.text.tool_syntax.tool import Tool

_LEFT_OUT = "Left out with a note: this server runs no tools itself."


class CustomTool(StrictModel):
    """A function of the client's."""

    type: Literal["custom"] = "custom"
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any] = Field(description="JSON Schema of an object.")
    strict: bool | None = Field(None, description="The input has to be as input_schema describes it.")
    input_examples: list[dict[str, Any]] | None = Field(None, description="A part of the description.")

    def plain(self) -> Tool:
        """Return it as the engine knows it."""
        examples = [json.dumps(example, ensure_ascii=False) for example in self.input_examples or ()]
        texts = (self.description, "\n".join(("Examples of the input:", *examples)) if examples else None)
        return Tool(self.name, "\n\n".join(filter(None, texts)) or None, self.input_schema, bool(self.strict))


ToolDefinition = Annotated[
    Annotated[CustomTool, Tag("<custom>")]
    | Annotated[TypedTool, Tag("<typed>")]
    | Annotated[ServerTool, Tag("<server>")],
    by_kind(),
    known_kinds(),
]


class AutoChoice(StrictModel):
    """The model chooses whether to call."""

    type: Literal["auto"]
    disable_parallel_tool_use: bool | None = None


class AnyChoice(StrictModel):
    """The model has to call."""

    type: Literal["any"]
    disable_parallel_tool_use: bool | None = None


class ToolNameChoice(StrictModel):
    """The model has to call this one."""

    type: Literal["tool"]
    name: FunctionName
    disable_parallel_tool_use: bool | None = None


class NoneChoice(StrictModel):
    """The model does not call."""

    type: Literal["none"]


MessageToolChoice = Annotated[
    Annotated[AutoChoice, Tag("<auto>")]
    | Annotated[AnyChoice, Tag("<any>")]
    | Annotated[ToolNameChoice, Tag("<tool>")]
    | Annotated[NoneChoice, Tag("<none>")],
    by_type(),
    known_types("choices", ("auto", "any", "tool", "none")),
]
_CHOICE_OF_TOOLS = Rule(
    "tool_choice",
    "tool_choice asks for a call, but there are no tools that the model can call",
    lambda fields: (
        not isinstance(fields["tool_choice"], AnyChoice | ToolNameChoice)
        or any(not isinstance(tool, ServerTool) for tool in fields["tools"] or ())
    ),
    {
        "anyOf": [
            {
                "properties": {
                    "tool_choice": {"anyOf": [{"type": "null"}, {"properties": {"type": {"enum": ["auto", "none"]}}}]}
                }
            },
            {"required": ["tools"], "properties": {"tools": {"type": "array", "contains": OF_MODELS}}},
        ]
    },
)


class ShownThinking(StrictModel):
    """The model may think. The answer always has its thoughts as they are."""

    display: Literal["summarized", "omitted", "updates"] | None = None

    @model_validator(mode="after")
    def _note_display(self) -> Self:
        if self.display not in (None, "summarized"):
            left_out.leave_out(f"thinking.display ({self.display})")
        return self


class EnabledThinking(ShownThinking):
    """The model may think, so many tokens at most."""

    type: Literal["enabled"]
    budget_tokens: Annotated[int, Field(ge=1, le=2**31)]


class AdaptiveThinking(ShownThinking):
    """The model may think."""

    type: Literal["adaptive"]


class DisabledThinking(StrictModel):
    """The model does not think, if its chat template can switch that off."""

    type: Literal["disabled"]


Thinking = Annotated[
    Annotated[EnabledThinking, Tag("<enabled>")]
    | Annotated[AdaptiveThinking, Tag("<adaptive>")]
    | Annotated[DisabledThinking, Tag("<disabled>")],
    by_type(),
    known_types("ways to think", ("enabled", "adaptive", "disabled")),
]


class MessageSchemaFormat(StrictModel):
    """JSON that a schema describes."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(StrictModel):
    """What the answer is to be."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="For chat templates that know it."
    )
    format: Annotated[MessageSchemaFormat, known_types("formats", ("json_schema",))] | None = None


class ContextManagement(StrictModel):
    """How a conversation is to be shortened. None is: the model reads what its chat template shows."""

    edits: list[dict[str, Any]] | None = None

    @model_validator(mode="after")
    def _note_edits(self) -> Self:
        for place, edit in enumerate(self.edits or ()):
            if edit.get("keep") != "all":
                left_out.leave_out(f"context_management.edits[{place}] ({edit.get('type')})")
        return self


class MessageInput(TemplateFields):
    """A conversation, and how it is to go on: what there is to count of a request."""

    rules: ClassVar[tuple[Rule, ...]] = (_CHOICE_OF_TOOLS,)

    model: str | None = Field(None, description="The served model's name; may be left out.")
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    system: TextBlocks | None = None
    tools: Annotated[list[ToolDefinition], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = Field(
        None, description=NAMES_OF_TOOLS
    )
    tool_choice: MessageToolChoice | None = Field(None, description="auto, if there are tools, unless set.")
    thinking: Thinking | None = Field(None, description="As the chat template has it, unless set.")
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    container: str | dict[str, Any] | None = Field(None, description=_LEFT_OUT)
    mcp_servers: list[dict[str, Any]] | None = Field(None, description=_LEFT_OUT)

    @model_validator(mode="after")
    def _note_servers(self) -> Self:
        for name in ("container", "mcp_servers"):
            if getattr(self, name):
                left_out.leave_out(name)
        return self

    def asked(self, sampling: SamplingParams) -> Conversation:
        """Return the conversation, in the form that all APIs share. Raises: RequestError, naming the field."""
        turns = Turns()
        system = system_text(self.system or "")
        if system:
            turns.say("system", system)
        for one in self.messages:
            one.add_to(turns)
        messages = turns.conversation("messages")
        if not messages:
            raise RequestError("the model can read no block of these messages; add a text", param="messages")
        begun = begun_text(messages) if isinstance(self.messages[-1], AssistantMessage) else None
        if begun is not None and begun != begun.rstrip():
            raise RequestError("final assistant content cannot end with trailing whitespace; cut it", param="messages")
        config, thinking = self.output_config, self.thinking
        is_thinking = None if thinking is None else not isinstance(thinking, DisabledThinking)
        return Conversation(
            messages=messages,
            tools=self._tool_wish(),
            sampling=sampling,
            variables=self.template_variables(config.effort if config else None, is_thinking=is_thinking),
            form=JsonForm(config.format.schema_) if config and config.format else None,
            form_field="output_config.format",
            max_reasoning_tokens=thinking.budget_tokens if isinstance(thinking, EnabledThinking) else None,
            limits_if_possible=True,
            begun=begun,
        )

    def _tool_wish(self) -> ToolChoice:
        choice, tools = self.tool_choice, []
        for place, tool in enumerate(self.tools or ()):
            plain = tool.plain()
            if plain is None:
                left_out.leave_out(f"tools[{place}] ({tool.type})")
            else:
                tools.append(plain)
        return ToolChoice(
            tools,
            names={choice.name} if isinstance(choice, ToolNameChoice) else None,
            is_required=isinstance(choice, AnyChoice | ToolNameChoice),
            is_parallel=not getattr(choice, "disable_parallel_tool_use", False),
            is_off=isinstance(choice, NoneChoice),
        )


class CountRequest(MessageInput):
    """Count the tokens of a conversation."""


class MessageRequest(MessageInput, SamplerFields):
    """Answer in a conversation."""

    max_tokens: Annotated[int, Field(ge=1, le=2**31)]
    stop_sequences: Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)] | None = None

    def conversation(self) -> Conversation:
        """Return the conversation, in the form that all APIs share. Raises: RequestError, naming the field."""
        asked = self.asked(self.sampling_params(max_tokens=self.max_tokens, stop=self.stop_sequences))
        is_kept_anyway = (asked.max_reasoning_tokens or 0) >= self.max_tokens
        return replace(asked, max_reasoning_tokens=None) if is_kept_anyway else asked
