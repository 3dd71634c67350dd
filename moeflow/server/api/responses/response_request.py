"""What `/v1/responses` takes, in OpenAI's words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, Tag

from moeflow.core.sampling_params import MAX_LOGPROBS, SamplingParams
from moeflow.server.api.conversation.conversation import Conversation
from moeflow.server.api.conversation.turns import Turns
from moeflow.server.api.responses.offered_tools import OfferedTools
from moeflow.server.api.responses.response_items import Message
from moeflow.server.api.responses.response_tools import ResponseToolChoice, ToolDefinitions
from moeflow.server.api.responses.tool_items import AdditionalTools, Item, ToolSearchOutput, add_item
from moeflow.server.api.schema.answer_form import JsonObjectFormat, TextFormat
from moeflow.server.api.schema.batch import Metadata
from moeflow.server.api.schema.field_rules import Rule, needs_true
from moeflow.server.api.schema.left_out import leave_out
from moeflow.server.api.schema.sampling_fields import IGNORED, MaxTokens, SamplerFields
from moeflow.server.api.schema.strict_model import StrictModel
from moeflow.server.api.schema.tagged import by_type, known_types, text_or_list
from moeflow.server.api.schema.template_fields import ReasoningEffort, TemplateFields, ThinkingBudget
from moeflow.server.api.schema.tools import CHOICE_OF_TOOLS, NAMES_OF_TOOLS
from moeflow.text.answer_form.form import Form, JsonForm


class ResponseSchemaFormat(StrictModel):
    """JSON that a schema describes."""

    type: Literal["json_schema"]
    name: str
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = Field(None, description="Accepted; answers are always as the schema says.")


Format = Annotated[
    Annotated[TextFormat, Tag("<text>")]
    | Annotated[JsonObjectFormat, Tag("<json_object>")]
    | Annotated[ResponseSchemaFormat, Tag("<json_schema>")],
    by_type(),
    known_types("formats", ("text", "json_object", "json_schema")),
]


class TextConfig(StrictModel):
    """The form of the answer's text."""

    format: Format | None = None

    def form(self) -> Form | None:
        """Return the form; None: any."""
        match self.format:
            case JsonObjectFormat():
                return JsonForm({"type": "object"})
            case ResponseSchemaFormat():
                return JsonForm(self.format.schema_)
        return None


class ReasoningConfig(StrictModel):
    """How the model is to reason."""

    effort: ReasoningEffort | None = Field(
        None, description="For chat templates that know it; none also switches off reasoning that can be."
    )
    summary: Literal["auto", "concise", "detailed", "none"] | None = Field(
        None, description="Accepted; all of the reasoning is returned, as content."
    )
    generate_summary: Literal["auto", "concise", "detailed", "none"] | None = Field(None, description="The older name.")


class ResponseStreamOptions(StrictModel):
    """How a stream is sent."""


SEALED_REASONING = "reasoning.encrypted_content"
_LOGPROBS = "message.output_text.logprobs"
Input = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[Item], Field(fail_fast=True), Tag("<list>")],
    text_or_list(),
]


class ResponseInput(TemplateFields):
    """A conversation, and how it is to go on: what there is to count of a request."""

    rules: ClassVar[tuple[Rule, ...]] = (CHOICE_OF_TOOLS,)

    model: str | None = Field(None, description="The served model's name; may be left out.")
    input: Input
    instructions: str | None = Field(None, description="Of the system; not kept for the next response.")
    previous_response_id: str | None = Field(
        None, description="A stored response that this one follows: what went into it and came out is before the input."
    )
    truncation: Literal["disabled", "auto"] | None = Field(
        None, description="Accepted; a conversation that is too long is an error."
    )

    tools: ToolDefinitions | None = Field(None, description=NAMES_OF_TOOLS)
    tool_choice: ResponseToolChoice | None = Field(None, description="auto, if there are tools, unless set.")
    parallel_tool_calls: bool | None = Field(None, description="Several calls in one answer; true unless set.")
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None

    def items(self) -> Sequence[Item]:
        """Return the input as items."""
        if isinstance(self.input, str):
            return [Message.model_validate({"role": "user", "content": self.input})]
        return self.input

    def offered_tools(self, history: Sequence[Item]) -> OfferedTools:
        """Return the tools of the request and of the conversation. Raises: RequestError, naming the field."""
        offered = OfferedTools()
        offered.add(self.tools or ())
        for item in (*history, *self.items()):
            if isinstance(item, AdditionalTools | ToolSearchOutput):
                offered.add_found(item.tools, f"input ({item.type})")
        return offered

    def asked(
        self,
        history: Sequence[Item],
        tools: OfferedTools,
        sampling: SamplingParams,
        *,
        max_reasoning_tokens: int | None = None,
    ) -> Conversation:
        """Return the conversation, after earlier items, in the form that all APIs share.

        A conversation without messages gets an empty one of the user.

        Raises: RequestError, naming the field.
        """
        turns = Turns()
        if self.instructions:
            turns.say("system", self.instructions)
        turns.place = "previous_response_id"
        for item in history:
            add_item(item, turns)
        for index, item in enumerate(self.items()):
            turns.place = f"input[{index}]"
            add_item(item, turns)
        messages = turns.conversation("input")
        if len(messages) == bool(self.instructions):
            messages.append({"role": "user", "content": ""})
        return Conversation(
            messages=messages,
            tools=tools.wish(self.tool_choice, is_parallel=self.parallel_tool_calls is not False),
            sampling=sampling,
            variables=self.template_variables(self.reasoning.effort if self.reasoning else None),
            form=self.text.form() if self.text else None,
            form_field="text.format",
            max_reasoning_tokens=max_reasoning_tokens,
        )


class InputTokensRequest(ResponseInput):
    """Count the tokens of a conversation."""


class ResponseRequest(ResponseInput, SamplerFields):
    """Answer, by a message, by calls of functions, or by both."""

    rules: ClassVar[tuple[Rule, ...]] = (needs_true("stream_options", "stream"), *ResponseInput.rules)

    max_output_tokens: MaxTokens = Field(None, description="Reasoning included. The context's end is a limit, too.")
    stream_options: ResponseStreamOptions | None = None
    include: Annotated[list[str], Field(fail_fast=True)] | None = Field(
        None,
        description=f"{_LOGPROBS}, and {SEALED_REASONING} for reasoning that clients send back; all else is ignored. "
        "Reasoning is always there, as plain content.",
    )
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = Field(
        None, description="How many of the likeliest tokens come with each token of the text."
    )
    max_tool_calls: Annotated[int, Field(ge=0)] | None = Field(
        None, description="Of tools that the server runs: there are none."
    )
    thinking_token_budget: ThinkingBudget | None = Field(
        None, description="Tokens of reasoning at most, for models that reason; then the answer begins."
    )

    metadata: Metadata | None = None
    store: bool | None = Field(None, description="Keep the response for a while, in memory; true unless set.")
    user: str | None = Field(None, description=IGNORED)

    @property
    def seals_reasoning(self) -> bool:
        """Whether reasoning comes as encrypted content, too."""
        return SEALED_REASONING in (self.include or ())

    def conversation(self, history: Sequence[Item], tools: OfferedTools) -> Conversation:
        """Return the conversation, after earlier items. Raises: RequestError, naming the field."""
        for included in self.include or ():
            if included not in (_LOGPROBS, SEALED_REASONING):
                leave_out(f"include ({included})")
        wants_logprobs = _LOGPROBS in (self.include or ()) or self.top_logprobs
        sampling = self.sampling_params(
            max_tokens=self.max_output_tokens, logprobs=(self.top_logprobs or 0) if wants_logprobs else None
        )
        return self.asked(history, tools, sampling, max_reasoning_tokens=self.thinking_token_budget)
