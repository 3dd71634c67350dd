"""The served models as Codex lists them: the array `models` of `GET /v1/models`.

Codex takes the context window of a model from here, and with it the length at which it summarizes a conversation.
"""

from __future__ import annotations

from typing import Final, Literal

from pydantic import BaseModel

_INSTRUCTIONS: Final = (
    "You are a coding agent in a terminal. You and the user share one workspace. Read files before you change them. "
    "Make small changes that solve the whole task. Use your tools, and never guess their results. "
    "Check your changes with the tests of the project. Commit or discard work only if the user asks for it. "
    "State briefly each step. At the end, summarize your changes and your checks."
)
_OUTPUT_BYTES: Final = 10_000  # of a tool's output that the model sees


class TruncationPolicy(BaseModel):
    """The largest output of a tool that the client passes on."""

    mode: Literal["bytes"] = "bytes"
    limit: int = _OUTPUT_BYTES


class CodexModel(BaseModel):
    """A model in Codex's words."""

    slug: str
    display_name: str
    description: None = None
    context_window: int | None
    max_context_window: int | None
    auto_compact_token_limit: None = None
    base_instructions: str = _INSTRUCTIONS
    default_reasoning_level: None = None
    supported_reasoning_levels: list[str] = []
    supports_reasoning_summaries: bool = False
    default_reasoning_summary: Literal["none"] = "none"
    shell_type: Literal["shell_command"] = "shell_command"
    apply_patch_tool_type: None = None
    visibility: Literal["list"] = "list"
    supported_in_api: bool = True
    priority: int
    availability_nux: None = None
    upgrade: None = None
    support_verbosity: bool = False
    default_verbosity: None = None
    truncation_policy: TruncationPolicy = TruncationPolicy()
    supports_parallel_tool_calls: bool = True
    experimental_supported_tools: list[str] = []
    supported_tools: list[str] = []
    input_modalities: list[Literal["text"]] = ["text"]
    supports_search_tool: bool = False


def codex_model(name: str, max_model_len: int | None, priority: int) -> CodexModel:
    """Return a model for Codex's list. Its client shows a model with a small `priority` first."""
    return CodexModel(
        slug=name,
        display_name=name,
        context_window=max_model_len,
        max_context_window=max_model_len,
        priority=priority,
    )
