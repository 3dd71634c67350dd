"""The beginning of an answer that a client sends, for the model to continue; and vLLM's fields that ask for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from moeflow.core.errors import RequestError
from moeflow.server.api.schema.strict_model import StrictModel


class ContinuationFields(StrictModel):
    """Whether the answer is a new message, or the rest of the last one."""

    continue_final_message: bool | None = Field(
        None,
        description="The answer continues the text of the last message, an assistant's without tool_calls, "
        "and has the new text alone. It excludes response_format, guided_*, strict tools and a forced call.",
    )
    add_generation_prompt: bool | None = Field(
        None, description="Always the opposite of continue_final_message; may be left out."
    )

    def begun(self, messages: Sequence[Mapping[str, Any]]) -> str | None:
        """Return the text that the answer continues; None: it is a new message.

        Raises: RequestError if the fields contradict each other, or the last message has no such text.
        """
        if self.add_generation_prompt is bool(self.continue_final_message):
            raise RequestError(
                "add_generation_prompt is the opposite of continue_final_message: leave it out, or change one of them",
                param="add_generation_prompt",
            )
        return begun_text(messages) if self.continue_final_message else None


def begun_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of the last message, for the answer to continue.

    Raises: RequestError if the last message is no assistant's, or calls tools.
    """
    last = messages[-1]
    if last["role"] != "assistant":
        problem = f"the last message has the role {last['role']!r}; send the beginning of the answer behind it"
        raise RequestError(
            f"continue_final_message needs an assistant's message at the end: {problem}", param="messages"
        )
    if last.get("tool_calls"):
        raise RequestError(
            "the last message calls tools, so its text is complete; send the results of the calls behind it",
            param="messages",
        )
    text: str = last["content"]
    return text


def check_free(*, has_form: bool, form_field: str, is_constrained: bool) -> None:
    """Raise RequestError where a grammar holds the answer: it covers whole answers, not the rest of one."""
    for is_given, field in ((has_form, form_field), (is_constrained, "tool_choice")):
        if is_given:
            raise RequestError(
                f"an answer that continues the last message cannot be held to a grammar, as {field} asks: leave out "
                "forms, strict tools and limits of tool_choice, or let a user's message come last",
                param=field,
            )
