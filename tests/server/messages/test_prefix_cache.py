"""The prompts of an agent's session, on a real engine: each request computes only its new part."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest

from moeflow.core.engine_messages import Submission, TokenOutput
from moeflow.engine.engine import Engine
from moeflow.engine.generator import Generator
from moeflow.llm import LLM
from moeflow.server.app import create_app
from moeflow.server.config import ServerConfig
from moeflow.text.tokenizer import Tokenizer
from tests.server.conftest import connect
from tests.server.fake_client import FakeClient
from tests.text.test_message_order import ANY, FIRST_ONLY
from tests.tiny_mixtral import write_tiny_mixtral

TOOLS = [{"name": f"tool_{n}", "description": "Does it. " * 20, "input_schema": {"type": "object"}} for n in range(6)]
USER = {"role": "user", "content": [{"type": "text", "text": "<system-reminder>\nToday.\n</system-reminder>"}]}
SYSTEM = {"role": "system", "content": "Available agent types: none."}


class SteppedEngine(FakeClient):
    """The client of an engine in this process, which computes one request at a time."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self.engine, self.model = engine, engine.model

    async def stream(self, submission: Submission) -> AsyncGenerator[TokenOutput, None]:
        self.submissions.append(submission)
        self.engine.submit(submission)
        while self.engine.has_work:
            for output in self.engine.step():
                yield output


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_mixtral(folder, max_position_embeddings=16384)
    return folder


def request_of(number: int, messages: list[dict]) -> dict:
    """Return a request of a session; clients change the first line of the system's text each time."""
    billing = f"x-anthropic-billing-header: cc_version=2.1.{number}; cc_entrypoint=cli; cch={number:05x};"
    texts = [{"type": "text", "text": text} for text in (billing, "You are an agent.", "Be careful. " * 150)]
    context = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    fields = {"max_tokens": 4, "ignore_eos": True, "temperature": 0, "context_management": context}
    return {"system": texts, "tools": TOOLS, "messages": messages, **fields}


@pytest.mark.anyio
@pytest.mark.parametrize("template", [ANY, FIRST_ONLY])
async def test_each_request_of_a_session_computes_only_what_is_new(model, template):
    (model / "chat_template.jinja").write_text(template)
    call = {"type": "tool_use", "id": "t1", "name": "tool_1", "input": {"path": "a"}}
    thought = {"type": "thinking", "thinking": "Hm.", "signature": ""}
    found = {"type": "tool_result", "tool_use_id": "t1", "content": "1\tx", "is_error": False}
    turns = [[USER, SYSTEM], [{"role": "assistant", "content": [thought, call]}, {"role": "user", "content": [found]}]]
    turns.append([{"role": "assistant", "content": "Done."}, {"role": "user", "content": "And now?"}])
    with LLM(str(model), num_threads=1, max_model_len=8192) as llm:
        engine = SteppedEngine(llm._engine, llm.tokenizer)
        block_size = llm.plan.config.scheduler.block_size
        messages, num_before = [], 0
        async with connect(create_app(Generator(engine, llm.tokenizer), ServerConfig())) as http:
            for number, more in enumerate(turns):
                messages += more
                response = await http.post("/v1/messages?beta=true", json=request_of(number, messages))
                assert response.headers["x-moeflow-left-out"] == "system (x-anthropic-billing-header)"
                usage = response.json()["usage"]
                assert usage["cache_read_input_tokens"] >= num_before - block_size
                num_before = usage["input_tokens"] + usage["cache_read_input_tokens"]
                assert num_before > 3000
    assert usage["input_tokens"] < 100 + block_size
