"""Prompts: one or several, as texts or as token ids."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from moeflow.server.api.schema.model_limits import PROMPTS
from moeflow.server.api.schema.sampling_fields import TokenIds
from moeflow.server.api.schema.strict_model import one_of

Text = Annotated[str, Field(min_length=1)]
SomeTokenIds = Annotated[TokenIds, Field(min_length=1)]
Prompt = Annotated[
    Text
    | SomeTokenIds
    | Annotated[list[Text], Field(min_length=1, fail_fast=True, json_schema_extra=PROMPTS)]
    | Annotated[list[SomeTokenIds], Field(min_length=1, fail_fast=True, json_schema_extra=PROMPTS)],
    one_of("a string, a list of strings, a list of token ids or a list of such lists, none of them empty"),
]


def prompts_of(given: Any) -> list[str | list[int]]:
    """Return a `Prompt`'s texts, each as text or token ids."""
    if isinstance(given, str) or isinstance(given[0], int):  # the first stands for all
        return [given]
    return list(given)
