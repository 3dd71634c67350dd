"""Tools that Anthropic's API knows by type: those of clients, with their schemas, and those of its servers."""

from __future__ import annotations

import re
from typing import Any, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field

from moeflow.server.api.schema.strict_model import refusal
from moeflow.server.api.schema.tools import FunctionName
from moeflow.text.tool_syntax.tool import Tool

# Of each kind of tool: no date, or any.
_CLIENTS: Final = r"(bash|text_editor|memory)_[0-9]{8}"
_SERVERS: Final = (
    r"(web_search|web_fetch|code_execution|tool_search_tool_regex|tool_search_tool_bm25|advisor|mcp_toolset"
    r"|computer|computer_toolset|browser_toolset)(_[0-9]{8})?"
)
OF_MODELS: Final[dict[str, Any]] = {  # as JSON Schema: a tool that the model gets
    "not": {"required": ["type"], "properties": {"type": {"type": "string", "pattern": f"^{_SERVERS}$"}}}
}
_REASONS: Final = {"function": "name, description and input_schema are plain fields"}
_TEXT: Final = {"type": "string"}
_RANGE: Final = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}
_EDITING: Final[dict[str, Any]] = {
    "path": _TEXT,
    "file_text": {**_TEXT, "description": "For create: the content."},
    "old_str": {**_TEXT, "description": "For str_replace: the text to replace, which must occur once."},
    "new_str": {**_TEXT, "description": "For str_replace: the text in its place."},
    "insert_line": {
        "type": "integer",
        "description": "For insert: the line after which the text is inserted; 0: before all.",
    },
    "insert_text": {**_TEXT, "description": "For insert: the text."},
    "view_range": {**_RANGE, "description": "For view: the first and the last line; -1: the end."},
}


def _editor(commands: tuple[str, ...], required: tuple[str, ...], **more: Any) -> dict[str, Any]:
    properties = {"command": {"enum": [*commands]}, **_EDITING, **more}
    return {"type": "object", "properties": properties, "required": ["command", *required]}


_EDITS: Final = ("view", "create", "str_replace", "insert")
_KNOWN: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "bash": (
        "Runs a command in a bash session that lasts.",
        {
            "type": "object",
            "properties": {
                "command": {**_TEXT, "description": "The command; needed unless restart is true."},
                "restart": {"type": "boolean", "description": "True: start the session anew."},
            },
        },
    ),
    "text_editor": ("Views and edits files.", _editor(_EDITS, ("path",))),
    "memory": (
        "Keeps notes as files in /memories, for later conversations. View this folder first.",
        _editor((*_EDITS, "delete", "rename"), (), old_path=_TEXT, new_path=_TEXT),
    ),
}


class TypedTool(BaseModel):
    """A tool whose schema its type implies. The client runs it."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: str = Field(pattern=f"^{_CLIENTS}$")
    name: FunctionName

    def plain(self) -> Tool:
        """Return it as the engine knows it."""
        description, schema = _KNOWN[self.type.rpartition("_")[0]]
        return Tool(self.name, description, schema)


class ServerTool(BaseModel):
    """A tool that Anthropic's servers run, or one that needs eyes: the model does not get it."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: str = Field(pattern=f"^{_SERVERS}$")

    def plain(self) -> None:
        """Return nothing."""


def by_kind() -> Discriminator:
    """Return what tells tools apart that are tagged custom, typed and server."""

    def tag_of(value: Any) -> str | None:
        return _group_of(value.get("type") if isinstance(value, dict) else getattr(value, "type", None))

    message = "must be an object with a type that is known here"
    return Discriminator(tag_of, custom_error_type="no_member", custom_error_message=message)


def known_kinds() -> BeforeValidator:
    """Return what refuses tools of other types by name."""

    def check(value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and _group_of(kind) is None:
            reason = _REASONS.get(kind, "send one of custom, bash_*, text_editor_*, memory_*")
            raise refusal("type", f"tools of type {kind[:80]!r} are not supported: {reason}")
        return value

    return BeforeValidator(check)


def _group_of(kind: Any) -> str | None:
    if kind is None or kind == "custom":
        return "<custom>"
    text = kind if isinstance(kind, str) else ""
    return "<typed>" if re.fullmatch(_CLIENTS, text) else "<server>" if re.fullmatch(_SERVERS, text) else None
