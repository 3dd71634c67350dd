"""The fields that `/api/chat` and `/api/generate` share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from moeflow.core.sampling_params import MAX_LOGPROBS, SamplingParams
from moeflow.server.api.ollama.options import OllamaOptions
from moeflow.server.api.schema.sampling_fields import IGNORED
from moeflow.server.api.schema.strict_model import one_of
from moeflow.server.api.schema.template_fields import TemplateFields
from moeflow.text.answer_form.form import JsonForm

MODEL = "The served model's name, with or without the tag :latest; may be left out."
KeepAlive = Annotated[
    float | Annotated[str, Field(pattern=r"^-?([0-9]+|([0-9]+(\.[0-9]+)?(ns|us|µs|ms|s|m|h))+)$")],
    one_of("seconds as a number, or a duration such as 5m"),
]
KEEP_ALIVE = "Accepted. Models stay loaded; 0 without a prompt unloads one that is loaded on demand."


class GeneratingRequest(TemplateFields):
    """How an answer is generated and sent."""

    model: str | None = Field(None, description=MODEL)
    stream: bool | None = Field(None, description="Lines as they are generated; true unless set.")
    format: Annotated[Literal["", "json"] | dict[str, Any], one_of('"json", or a JSON Schema as an object')] | None = (
        None
    )
    think: Annotated[bool | Literal["low", "medium", "high", "max"], one_of("a boolean, low, medium, high or max")] | (
        None
    ) = Field(None, description="For chat templates that know it.")
    options: OllamaOptions | None = None
    keep_alive: KeepAlive | None = Field(None, description=KEEP_ALIVE)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="With logprobs.")
    truncate: bool | None = Field(None, description="Accepted; a prompt that is too long is refused.")
    shift: bool | None = Field(None, description=IGNORED)

    @property
    def is_streamed(self) -> bool:
        """Whether lines are sent as they are generated."""
        return self.stream is not False

    @property
    def known_options(self) -> OllamaOptions:
        """The options; without any, all are left out."""
        return self.options or OllamaOptions.model_validate({})

    @property
    def is_to_unload(self) -> bool:
        """Whether the model need not stay loaded."""
        given = self.keep_alive
        return given is not None and not any(digit in str(given) for digit in "123456789")

    def to_sampling_params(self) -> SamplingParams:
        """Return the engine's parameters. Raises: RequestError, naming the field."""
        return self.known_options.to_sampling_params(logprobs=(self.top_logprobs or 0) if self.logprobs else None)

    def form(self) -> JsonForm | None:
        """Return the form that the answer must have."""
        match self.format:
            case None | "":
                return None
            case dict():
                return JsonForm(self.format)
            case _:
                return JsonForm({"type": "object"})

    def thinking_variables(self) -> dict[str, Any]:
        """Return the chat template's variables."""
        effort = self.think if isinstance(self.think, str) else None
        return self.template_variables(effort, is_thinking=None if self.think is None else bool(self.think))
