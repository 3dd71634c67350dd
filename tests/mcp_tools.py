"""Tools as public MCP servers describe them, in the forms of APIs that offer tools to models."""

from __future__ import annotations

import json
from typing import Any

from tests.documents import ROOT

FILE = ROOT / "tests" / "data" / "mcp_tools.json"


def mcp_tools() -> list[dict[str, Any]]:
    """Return the tools of all servers, as MCP's `tools/list` has them."""
    servers: dict[str, list[dict[str, Any]]] = json.loads(FILE.read_text())
    return [tool for tools in servers.values() for tool in tools]


def chat_tool(name: str, schema: dict[str, Any], description: str = "", *, is_strict: bool = False) -> dict[str, Any]:
    """Return a tool as chat completions take it."""
    function = {"name": name, "description": description, "parameters": schema, "strict": is_strict}
    return {"type": "function", "function": function}


def chat_tools() -> list[dict[str, Any]]:
    """Return all tools as chat completions take them."""
    return [chat_tool(tool["name"], tool["inputSchema"], tool["description"]) for tool in mcp_tools()]
