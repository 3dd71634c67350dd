"""What `/api/generate` takes."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from moeflow.server.api.conversation.conversation import Conversation
from moeflow.server.api.conversation.tool_choice import ToolChoice
from moeflow.server.api.ollama.generating_request import GeneratingRequest
from moeflow.server.api.schema.field_rules import Rule, not_all
from moeflow.server.api.schema.sampling_fields import TokenIds


def _not_raw(field: str) -> Rule:
    return not_all(field, "raw mode does not support system or context", {"raw": (None, False), field: (None, [], "")})


_CONTEXT_OF_PROMPT = Rule(
    "context",
    "context needs a prompt to go before",
    lambda fields: bool(fields["prompt"]) or not fields["context"],
    {
        "anyOf": [
            {"required": ["prompt"], "properties": {"prompt": {"type": "string", "minLength": 1}}},
            {"properties": {"context": {"type": ["array", "null"], "maxItems": 0}}},
        ]
    },
)


class OllamaGenerateRequest(GeneratingRequest):
    """Answer a prompt, or continue it as it stands."""

    rules: ClassVar[tuple[Rule, ...]] = (_not_raw("system"), _not_raw("context"), _CONTEXT_OF_PROMPT)

    prompt: str | None = Field(None, description="None: the model is loaded, nothing generated.")
    system: str | None = Field(None, description="A message of the system before the prompt.")
    raw: bool | None = Field(None, description="Continue the prompt without the chat template.")
    context: Annotated[TokenIds, Field(description="The context of an earlier answer, to go on from there.")] | (
        None
    ) = None

    def conversation(self) -> Conversation:
        """Return the request in the form that all APIs share. Raises: RequestError, naming the field."""
        turns = (("system", self.system), ("user", self.prompt))
        return Conversation(
            messages=[{"role": role, "content": text} for role, text in turns if text],
            tools=ToolChoice(()),
            sampling=self.to_sampling_params(),
            variables=self.thinking_variables(),
            form=self.form(),
            form_field="format",
            earlier_token_ids=self.context or (),
        )
