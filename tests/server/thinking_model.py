"""A model that reasons, and has special tokens around reasoning and calls, behind the application."""

from __future__ import annotations

from fastapi import FastAPI

from moeflow.engine.generator import Generator
from moeflow.server.app import create_app
from moeflow.server.config import ServerConfig
from moeflow.text.tokenizer import Tokenizer
from tests.engine.fakes import byte_level_core, wrap
from tests.server.fake_client import FakeClient

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}{{ reasoning_effort }}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{% if tools %}[TOOL_CALLS]{% endif %}{% if begin %}<think>{% endif %}"
)


def thinking_model() -> tuple[FastAPI, FakeClient, Tokenizer]:
    """The application, its engine and its tokenizer."""
    tokenizer = wrap(
        byte_level_core(),
        eos_token="<|end|>",
        chat_template=TEMPLATE,
        extra_special_tokens=["<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "<other>"],
    )
    engine = FakeClient(tokenizer, max_model_len=4096)
    return create_app(Generator(engine, tokenizer), ServerConfig()), engine, tokenizer
