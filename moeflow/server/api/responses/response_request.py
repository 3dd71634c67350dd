"""What `/v1/responses` takes, in OpenAI's words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, Tag

from moeflow.core.errors import RequestError
from moeflow.core.sampling_params import MAX_LOGPROBS, SamplingParams
from moeflow.engine.text.answer_form.form import Form, JsonForm
from moeflow.engine.text.tool_syntax.tool import Tool
from moeflow.server.api.conversation.conversation import Conversation
from moeflow.server.api.conversation.tool_wish import ToolWish
from moeflow.server.api.conversation.turns import Turns
from moeflow.server.api.responses.response_items import Item, Message
from moeflow.server.api.schema.answer_form import JsonObjectFormat, TextFormat
from moeflow.server.api.schema.batch import Metadata
from moeflow.server.api.schema.field_rules import Rule, needs_true
from moeflow.server.api.schema.sampling_fields import IGNORED, MaxTokens, SamplerFields
from moeflow.server.api.schema.strict_model import StrictModel, one_of
from moeflow.server.api.schema.tagged import by_type, known_types, text_or_list
from moeflow.server.api.schema.template_fields import ReasoningEffort, TemplateFields, ThinkingBudget
from moeflow.server.api.schema.tools import CHOICE_OF_TOOLS, MAX_TOOLS, NAMES_OF_TOOLS, FunctionName

_HOSTED = "this server runs no tools itself"


class FunctionTool(StrictModel):
    """A function of the client's."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON Schema of an object; left out: no arguments.")
    strict: bool | None = Field(None, description="Arguments have to be as parameters describe them.")

    def plain(self) -> Tool:
        """Return it as the engine knows it."""
        return Tool(self.name, self.description, self.parameters, bool(self.strict))


ToolDefinition = Annotated[
    FunctionTool, known_types("tools", ("function",), {"custom": "the model calls functions only"})
]


class NamedFunction(StrictModel):
    """A function by name."""

    type: Literal["function"]
    name: FunctionName


class AllowedFunctions(StrictModel):
    """Some of the functions."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<word>")]
    | Annotated[NamedFunction, Tag("<function>")]
    | Annotated[AllowedFunctions, Tag("<allowed_tools>")],
    by_type("word"),
    one_of("none, auto, required, a function by name, or allowed_tools"),
]


class SchemaFormat(StrictModel):
    """JSON that a schema describes."""

    type: Literal["json_schema"]
    name: str
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = Field(None, description="Accepted; answers are always as the schema says.")


Format = Annotated[
    Annotated[TextFormat, Tag("<text>")]
    | Annotated[JsonObjectFormat, Tag("<json_object>")]
    | Annotated[SchemaFormat, Tag("<json_schema>")],
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
            case SchemaFormat():
                return JsonForm(self.format.schema_)
        return None


class ReasoningConfig(StrictModel):
    """How the model is to reason."""

    effort: ReasoningEffort | None = Field(
        None, description="For chat templates that know it; none also switches off reasoning that can be."
    )
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="Accepted; all of the reasoning is returned, as content."
    )
    generate_summary: Literal["auto", "concise", "detailed"] | None = Field(None, description="The older name.")


class ResponseStreamOptions(StrictModel):
    """How a stream is sent."""


Included = Literal[  # what all but the first two ask for is of tools that there are none of
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
    "file_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "message.input_image.image_url",
]
Input = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[Item], Field(min_length=1, fail_fast=True), Tag("<list>")],
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
    truncation: (
        Annotated[Literal["disabled"], one_of("disabled: a conversation that is too long is an error")] | None
    ) = None

    tools: Annotated[list[ToolDefinition], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = Field(
        None, description=NAMES_OF_TOOLS
    )
    tool_choice: ToolChoice | None = Field(None, description="auto, if there are tools, unless set.")
    parallel_tool_calls: bool | None = Field(None, description="Several calls in one answer; true unless set.")
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None

    def items(self) -> Sequence[Item]:
        """Return the input as items."""
        if isinstance(self.input, str):
            return [Message.model_validate({"role": "user", "content": self.input})]
        return self.input

    def asked(
        self, history: Sequence[Item], sampling: SamplingParams, *, max_reasoning_tokens: int | None = None
    ) -> Conversation:
        """Return what is asked, after the items before, in the form that all APIs share.

        Raises: RequestError, naming the field.
        """
        turns = Turns()
        if self.instructions:
            turns.say("system", self.instructions)
        turns.place = "previous_response_id"
        for item in history:
            item.add_to(turns)
        for index, item in enumerate(self.items()):
            turns.place = f"input[{index}]"
            item.add_to(turns)
        messages = turns.conversation("input")
        if not messages:
            raise RequestError("there is nothing in it that the model could read", param="input")
        return Conversation(
            messages=messages,
            tools=self._tool_wish(),
            sampling=sampling,
            variables=self.template_variables(self.reasoning.effort if self.reasoning else None),
            form=self.text.form() if self.text else None,
            form_field="text.format",
            max_reasoning_tokens=max_reasoning_tokens,
        )

    def _tool_wish(self) -> ToolWish:
        choice, names, is_required = self.tool_choice, None, self.tool_choice == "required"
        if isinstance(choice, NamedFunction):
            names, is_required = {choice.name}, True
        elif isinstance(choice, AllowedFunctions):
            names, is_required = {tool.name for tool in choice.tools}, choice.mode == "required"
        return ToolWish(
            [tool.plain() for tool in self.tools or ()],
            names=names,
            is_required=is_required,
            is_parallel=self.parallel_tool_calls is not False,
            is_off=choice == "none",
        )


class InputTokensRequest(ResponseInput):
    """Count the tokens of a conversation."""


class ResponseRequest(ResponseInput, SamplerFields):
    """Answer, by a message, by calls of functions, or by both."""

    rules: ClassVar[tuple[Rule, ...]] = (needs_true("stream_options", "stream"), *ResponseInput.rules)

    max_output_tokens: MaxTokens = Field(None, description="Reasoning included. The context's end is a limit, too.")
    stream_options: ResponseStreamOptions | None = None
    include: list[Included] | None = Field(None, description="Reasoning is always there, as plain content.")
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

    def conversation(self, history: Sequence[Item] = ()) -> Conversation:
        """Return what is asked, after the items before. Raises: RequestError, naming the field."""
        wants_logprobs = "message.output_text.logprobs" in (self.include or ()) or self.top_logprobs
        sampling = self.sampling_params(
            max_tokens=self.max_output_tokens, logprobs=(self.top_logprobs or 0) if wants_logprobs else None
        )
        return self.asked(history, sampling, max_reasoning_tokens=self.thinking_token_budget)
