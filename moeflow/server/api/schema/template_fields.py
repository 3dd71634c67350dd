"""What a request may hand to the chat template beside messages and tools, and how much the model is to reason."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from moeflow.server.api.schema.strict_model import StrictModel, refusal

_TAKEN = ("messages", "tools", "documents", "add_generation_prompt")  # names that are not a request's to set
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
ThinkingBudget = Annotated[int, Field(ge=0, le=2**31)]


def _check_variables(variables: dict[str, Any]) -> dict[str, Any]:
    for name in _TAKEN:
        if name in variables:
            raise refusal("", f"chat_template_kwargs may not set {name!r}")
    return variables


TemplateVariables = Annotated[
    dict[str, Any],
    Field(json_schema_extra={"propertyNames": {"not": {"enum": [*_TAKEN]}}}),
    AfterValidator(_check_variables),
]


class TemplateFields(StrictModel):
    """Variables of the chat template."""

    chat_template_kwargs: TemplateVariables | None = Field(
        None, description='What the chat template may use beside messages, such as {"enable_thinking": false}.'
    )

    def template_variables(self, effort: str | None, *, is_thinking: bool | None = None) -> dict[str, Any]:
        """Return what the template may use, under the names that templates know; `is_thinking` None: as it likes."""
        if effort == "none":
            is_thinking = False
        return {
            **({} if effort is None else {"reasoning_effort": effort}),
            **({} if is_thinking is None else {"enable_thinking": is_thinking, "thinking": is_thinking}),
            **(self.chat_template_kwargs or {}),
        }
