"""A session through Pydantic AI: with_pydantic_ai.py URL PROTOCOL TASK. Protocols: chat, responses, messages."""

from __future__ import annotations

import asyncio
import sys

from anthropic import AsyncAnthropic
from file_tools import TOOLS
from openai import AsyncOpenAI
from pydantic_ai import Agent
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


def model_of(url: str, protocol: str) -> Model:
    """Return the model behind a protocol."""
    if protocol == "messages":
        client = AsyncAnthropic(base_url=url, api_key="none", max_retries=0)
        return AnthropicModel("scripted", provider=AnthropicProvider(anthropic_client=client))
    kind = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}[protocol]
    openai = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    return kind("scripted", provider=OpenAIProvider(openai_client=openai))


async def run(url: str, protocol: str, task: str) -> str:
    """Return the final answer of a streamed run."""
    agent = Agent(model_of(url, protocol), instructions="You edit files.", tools=list(TOOLS.values()), retries=0)
    async with agent.run_stream(task) as result:
        return str(await result.get_output())


if __name__ == "__main__":
    print(asyncio.run(run(*sys.argv[1:])))
