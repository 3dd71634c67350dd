"""Kinds of tools and items that OpenAI's servers run. Requests may have them, and this server leaves them out."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field

from moeflow.server.api.schema.left_out import ignores_unknown_fields
from moeflow.server.api.schema.strict_model import refusal
from moeflow.server.api.schema.tagged import TAG

HOSTED: Final = f"{TAG}hosted>"  # their tag in a union
_TOOLS: Final = (
    "apply_patch",
    "code_interpreter",
    "computer",
    "computer_use",
    "computer_use_preview",
    "file_search",
    "image_generation",
    "mcp",
    "programmatic_tool_calling",
    "shell",
    "web_search",
    "web_search_2025_08_26",
    "web_search_preview",
    "web_search_preview_2025_03_11",
)
_ITEMS: Final = (
    "apply_patch_call",
    "apply_patch_call_output",
    "code_interpreter_call",
    "compaction",
    "compaction_summary",
    "compaction_trigger",
    "computer_call",
    "computer_call_output",
    "configuration_update",
    "context_compaction",
    "file_search_call",
    "ghost_snapshot",
    "image_generation_call",
    "mcp_approval_request",
    "mcp_approval_response",
    "mcp_call",
    "mcp_list_tools",
    "program",
    "program_output",
    "shell_call",
    "shell_call_output",
    "web_search_call",
)


class HostedTool(BaseModel):
    """A tool that the server does not offer to the model. Its other fields may be anything."""

    model_config = ConfigDict(strict=True, extra="allow")
    type: Annotated[str, Field(json_schema_extra={"enum": [*_TOOLS]})]


class HostedItem(BaseModel):
    """An item that the model does not see. Its other fields may be anything."""

    model_config = ConfigDict(strict=True, extra="allow")
    type: Annotated[str, Field(json_schema_extra={"enum": [*_ITEMS]})]


class Kinds:
    """The kinds of a union: its own, and hosted ones. The server may ignore all others (`--unknown-fields`)."""

    def __init__(self, what: str, own: Collection[str], hosted: Collection[str], default: str | None = None) -> None:
        self._what, self._own, self._hosted, self._default = what, own, hosted, default

    def discriminator(self) -> Discriminator:
        """Return the discriminator for members with the tags `<KIND>`, and `HOSTED`."""
        message = "must be an object with a type that is known here"
        return Discriminator(self._tag, custom_error_type="no_member", custom_error_message=message)

    def known(self, reasons: Mapping[str, str] | None = None) -> BeforeValidator:
        """Return the validator that refuses other kinds by name, some for `reasons` of their own."""

        def check(value: Any) -> Any:
            kind = self._kind(value)
            if isinstance(kind, str) and not self._is_hosted(kind) and kind not in self._own:
                reason = (reasons or {}).get(kind, f"send one of {', '.join(self._own)}")
                raise refusal("type", f"{self._what} of type {kind[:80]!r} are not supported: {reason}")
            return value

        return BeforeValidator(check)

    def _tag(self, value: Any) -> str | None:
        kind = self._kind(value)
        if not isinstance(kind, str):
            return None
        return HOSTED if self._is_hosted(kind) else f"{TAG}{kind}>"

    def _kind(self, value: Any) -> Any:
        return value.get("type", self._default) if isinstance(value, dict) else getattr(value, "type", self._default)

    def _is_hosted(self, kind: str) -> bool:
        return kind not in self._own and (kind in self._hosted or ignores_unknown_fields())


def tool_kinds(own: Collection[str], default: str | None = None) -> Kinds:
    """Return the kinds of tools."""
    return Kinds("tools", own, _TOOLS, default)


def item_kinds(own: Collection[str]) -> Kinds:
    """Return the kinds of items. An item without a type is a message."""
    return Kinds("items", own, _ITEMS, "message")
