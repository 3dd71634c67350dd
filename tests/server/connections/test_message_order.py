"""System messages where a chat template does not take them: all APIs of conversations arrange them alike."""

from __future__ import annotations

import pytest

from moeflow.engine.generator import Generator
from moeflow.server.app import create_app
from moeflow.server.config import ServerConfig
from tests.engine.fakes import byte_level_core, wrap
from tests.server.conftest import connect
from tests.server.conversing import prompt_of
from tests.server.fake_client import FakeClient
from tests.text.test_message_order import ANY, FIRST_ONLY, NO_SYSTEM

pytestmark = pytest.mark.anyio

USER, SYSTEM, DEVELOPER = ({"role": role, "content": role} for role in ("user", "system", "developer"))


@pytest.mark.parametrize(
    ("path", "body", "prompt"),
    [
        ("chat/completions", {"messages": [SYSTEM, DEVELOPER, USER, SYSTEM]}, "system\n\ndeveloper\n\nsystem"),
        ("responses", {"instructions": "I", "input": [DEVELOPER, USER, SYSTEM]}, "I\n\ndeveloper\n\nsystem"),
        ("messages", {"system": "I", "messages": [USER, SYSTEM], "max_tokens": 9}, "I\n\nsystem"),
    ],
)
async def test_system_messages_stand_first_where_the_template_needs_it(path, body, prompt):
    tokenizer = wrap(byte_level_core(), eos_token="<|end|>", chat_template=FIRST_ONLY)
    engine = FakeClient(tokenizer)
    async with connect(create_app(Generator(engine, tokenizer), ServerConfig())) as http:
        assert (await http.post(f"/v1/{path}", json=body)).status_code == 200
    assert prompt_of(engine, tokenizer) == f"<system>{prompt}<user>user"


async def test_system_messages_stay_where_the_template_takes_them():
    tokenizer = wrap(byte_level_core(), eos_token="<|end|>", chat_template=ANY)
    engine = FakeClient(tokenizer)
    async with connect(create_app(Generator(engine, tokenizer), ServerConfig())) as http:
        await http.post("/v1/chat/completions", json={"messages": [SYSTEM, DEVELOPER, USER, SYSTEM]})
    assert prompt_of(engine, tokenizer) == "<system>system<system>developer<user>user<system>system"


async def test_tools_are_described_where_the_template_refuses_system_messages():
    tokenizer = wrap(byte_level_core(), eos_token="<|end|>", chat_template=NO_SYSTEM)
    engine = FakeClient(tokenizer, max_model_len=4096)
    body = {"messages": [USER, SYSTEM], "tools": [{"type": "function", "function": {"name": "look"}}]}
    async with connect(create_app(Generator(engine, tokenizer), ServerConfig())) as http:
        assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
    prompt = prompt_of(engine, tokenizer)
    assert prompt.startswith("<user># Tools")
    assert prompt.endswith("\n\nsystem\n\nuser")
