"""Tools for models whose chat template tells them of none: described in the system message, and calls and results
written as plain turns. Such a model was not trained for it, and calls as well as it follows instructions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

_INTRODUCTION: Final = """# Tools

You may call one or more of these functions to answer, one described in each line:
<tools>
{tools}
</tools>

To call one, write
{example}
and nothing behind it: then you get what it returns."""
HERMES_EXAMPLE: Final = """<tool_call>
{"name": "<name>", "arguments": {"<name of an argument>": <its value>}}
</tool_call>"""


def with_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], example: str, *, has_system: bool
) -> list[dict[str, Any]]:
    """Return a conversation whose system message describes the tools, and shows how one is called.

    Without system messages (`has_system`), the first message does.
    """
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = _INTRODUCTION.replace("{tools}", lines).replace("{example}", example)
    if messages and not has_system:
        return [{**messages[0], "content": f"{text}\n\n{messages[0]['content']}"}, *map(dict, messages[1:])]
    if messages and messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}
        return [first, *map(dict, messages[1:])]
    return [{"role": "system", "content": text}, *map(dict, messages)]


def as_plain_turns(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a conversation with calls as text of the assistant, and results as turns of the user."""
    found: list[dict[str, Any]] = []
    has_results = False
    for message in messages:
        if message["role"] == "tool":
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if has_results:  # of several calls: one turn
                found[-1]["content"] += f"\n{text}"
            else:
                found.append({"role": "user", "content": text})
            has_results = True
        else:
            found.append(_without_calls(message))
            has_results = False
    return found


def _without_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    written = [{"name": call["name"], "arguments": call["arguments"]} for call in calls]
    texts = [f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in written]
    plain = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
    return plain | {"content": "\n".join(filter(None, (message["content"], *texts)))}
