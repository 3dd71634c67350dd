"""A session through the OpenAI Agents SDK: with_openai_agents.py URL PROTOCOL TASK. Protocols: chat, responses."""

from __future__ import annotations

import asyncio
import sys

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from file_tools import TOOLS
from openai import AsyncOpenAI

MODELS = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}


async def run(url: str, protocol: str, task: str) -> str:
    """Return the final answer of a streamed run."""
    set_tracing_disabled(True)
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        model = MODELS[protocol](model="scripted", openai_client=client)
        tools = [function_tool(tool) for tool in TOOLS.values()]
        agent = Agent(name="editor", instructions="You edit files.", model=model, tools=tools)
        result = Runner.run_streamed(agent, task)
        async for _ in result.stream_events():
            pass
        return str(result.final_output)


if __name__ == "__main__":
    print(asyncio.run(run(*sys.argv[1:])))
