"""The tools of a conversation, and the tools to call, for all APIs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from moeflow.core.errors import RequestError
from moeflow.text.tool_syntax.tool import Tool


class ToolChoice:
    """All that a request states about tools."""

    def __init__(
        self,
        tools: Sequence[Tool],
        *,
        names: Collection[str] | None = None,
        is_required: bool = False,
        is_parallel: bool = True,
        is_off: bool = False,
    ) -> None:
        """Tools, the `names` of callable ones (None: all), and whether a call is required; `is_off`: none may.

        Raises: RequestError if a name is not that of a tool, or two tools have the same.
        """
        self.is_required = is_required
        self.is_parallel = is_parallel
        by_name = {tool.name: tool for tool in tools}
        if len(by_name) < len(tools):
            twice = next(name for name, count in Counter(tool.name for tool in tools).items() if count > 1)
            raise RequestError(f"two tools have the same name, {twice!r}", param="tools")
        unknown = [name for name in names or () if name not in by_name]
        if unknown:
            raise RequestError(f"tool_choice names {unknown[0]!r}, which is none of the tools", param="tool_choice")
        self.tools: tuple[Tool, ...] = () if is_off else tuple(by_name.values())
        self.allowed = tuple(tool for tool in self.tools if names is None or tool.name in names)

    @property
    def is_constrained(self) -> bool:
        """Whether not every call that the model could write is wanted."""
        return self.is_required or len(self.allowed) < len(self.tools) or any(tool.is_strict for tool in self.allowed)
