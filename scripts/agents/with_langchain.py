"""A session through langchain-openai: with_langchain.py URL PROTOCOL TASK. Protocols: chat, responses."""

from __future__ import annotations

import sys

from file_tools import TOOLS, called
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI

MAX_TURNS = 8


def run(url: str, protocol: str, task: str) -> str:
    """Answer calls until the model has none, and return its last text."""
    model = ChatOpenAI(
        model="scripted",
        base_url=f"{url}/v1",
        api_key="none",
        max_retries=0,
        use_responses_api=protocol == "responses",
    ).bind_tools(list(TOOLS.values()))
    messages = [SystemMessage("You edit files."), HumanMessage(task)]
    for _ in range(MAX_TURNS):
        first, *rest = model.stream(messages)
        answer = sum(rest, first)
        messages.append(answer)
        if not answer.tool_calls:
            return str(answer.text)
        messages += [ToolMessage(called(c["name"], c["args"]), tool_call_id=c["id"]) for c in answer.tool_calls]
    raise SystemExit("the model calls tools without end")


if __name__ == "__main__":
    print(run(*sys.argv[1:]))
