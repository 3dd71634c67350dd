"""What Codex sends: its tools, the fields of its requests, and a conversation that grows turn by turn."""

from __future__ import annotations

import json
from typing import Any

from tests.server.events import read_typed_events

PATCH_GRAMMAR = (
    'start: begin hunk+ end\nbegin: "*** Begin Patch" LF\nend: "*** End Patch" LF?\n'
    'hunk: "*** Update File: " /(.+)/ LF line+\nline: ("+" | "-" | " ") /(.*)/ LF -> change\n%import common.LF\n'
)
PATCH = '*** Begin Patch\n*** Update File: notes.txt\n-the "red" \\ fox\n+the \U0001f98a ü\n*** End Patch\n'
STRING = {"type": "string"}
EXEC = {
    "type": "function",
    "name": "exec_command",
    "description": "Runs a command.",
    "strict": False,
    "parameters": {"type": "object", "properties": {"cmd": STRING}, "required": ["cmd"], "additionalProperties": False},
}
APPLY_PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": PATCH_GRAMMAR},
}
AGENTS = {
    "type": "namespace",
    "name": "multi_agent_v1",
    "description": "Tools for agents.",
    "tools": [
        {
            "type": "function",
            "name": "close_agent",
            "description": "Closes an agent.",
            "strict": False,
            "defer_loading": True,
            "parameters": {"type": "object", "properties": {"target": STRING}, "required": ["target"]},
        },
        {"type": "custom", "name": "note", "description": "Takes a note."},
    ],
}
TOOL_SEARCH = {
    "type": "tool_search",
    "execution": "client",
    "description": "Searches tools.",
    "parameters": {"type": "object", "properties": {"query": STRING}, "required": ["query"]},
}
HOSTED = {"type": "web_search", "external_web_access": True, "search_content_types": ["text", "image"]}
TOOLS = [EXEC, APPLY_PATCH, AGENTS, {"type": "local_shell"}, TOOL_SEARCH, HOSTED]
FIELDS = {
    "stream": True,
    "store": False,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": {"effort": "medium", "summary": "none", "context": "all_turns"},
    "include": ["reasoning.encrypted_content"],
    "service_tier": "auto",
    "truncation": "auto",
    "prompt_cache_key": "01a2",
    "text": {"verbosity": "low"},
    "client_metadata": {"turn_id": "01a2", "x-codex-window-id": "01a2:0"},
}
HEADERS = {"originator": "codex_exec", "session_id": "01a2", "x-codex-window-id": "01a2:0"}
OPENING = [
    {
        "type": "message",
        "id": "msg_1",
        "role": "developer",
        "content": [{"type": "input_text", "text": "You are a coding agent."}],
        "internal_chat_message_metadata_passthrough": {"turn_id": "01a2"},
    },
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Do it."}]},
]


def written(name: str, arguments: dict[str, Any]) -> str:
    """A call as the model writes it."""
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


async def events_of(http, items: list[dict], **changes) -> list[dict]:
    """The events of an answer to a conversation."""
    body = {"input": items, "tools": TOOLS, **FIELDS, "max_output_tokens": 2000, **changes}
    answer = await http.post("/v1/responses", json=body, headers=HEADERS)
    assert answer.status_code == 200, answer.text
    return read_typed_events(answer.text)


def done_items(events: list[dict]) -> list[dict]:
    """The items of an answer, which the client sends back."""
    assert events[-1]["type"] == "response.completed"
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert events[-1]["response"]["output"] == items
    return items
