"""What Claude Code and other agents send to `/v1/messages`; a header names what the server leaves out."""

from __future__ import annotations

from collections.abc import Iterator

import anthropic
import pytest

from moeflow.engine.generator import Generator
from moeflow.server.app import create_app
from moeflow.server.config import ServerConfig
from tests.server.conversing import anthropic_client, prompt_of
from tests.server.fake_client import FakeClient
from tests.server.live_server import serve_in_thread
from tests.server.messages.asking import ASK, TOOLS, asked
from tests.server.openai_objects import check
from tests.server.test_tools import TWO, says

BETAS = ["claude-code-20250219", "interleaved-thinking-2025-05-14", "context-management-2025-06-27"]
CACHE = {"type": "ephemeral", "ttl": "1h", "scope": "global"}
IMAGE = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": "aGk="},
    "cache_control": CACHE,
}
PDF = {"type": "document", "source": {"type": "url", "url": "https://a.example/x.pdf"}}
CALL = {"type": "tool_use", "id": "t1", "name": "look", "input": {"q": "x"}, "cache_control": CACHE}
NO_IMAGE = "[image left out: this model reads text only]"


def text(it: str) -> dict:
    return {"type": "text", "text": it, "cache_control": CACHE}


def result(*content: dict) -> list[dict]:
    """A conversation that ends with the result of a call."""
    block = {"type": "tool_result", "tool_use_id": "t1", "content": [*content], "cache_control": CACHE}
    return [*ASK, {"role": "assistant", "content": [CALL]}, {"role": "user", "content": [block]}]


def answer(*content: dict) -> list[dict]:
    """A conversation with an answer before its last question."""
    return [*ASK, {"role": "assistant", "content": [*content]}, *ASK]


def user(*content: dict) -> list[dict]:
    return [{"role": "user", "content": [*content]}]


@pytest.fixture(scope="module")
def served(tokenizer) -> Iterator[tuple[anthropic.Anthropic, FakeClient]]:
    """One server for all shapes."""
    engine = FakeClient(tokenizer, max_model_len=2**15)
    with anthropic_client(create_app(Generator(engine, tokenizer), ServerConfig())) as client:
        yield client, engine


def ask(client, **changes) -> tuple[str, object]:
    """Return the header about parts left out, and the answer."""
    raw = client.beta.messages.with_raw_response.create(**asked(betas=BETAS, **changes))
    return raw.headers.get("x-moeflow-left-out", ""), raw.parse()


@pytest.mark.parametrize(
    ("changes", "shown", "left_out"),
    [
        ({"system": [text("S"), text("T")], "messages": user(text("A"))}, ["S\nT", "A"], ""),
        (
            {"system": [text("x-anthropic-billing-header: cc_version=2; cch=1a2b3;"), text("You are")]},
            ["<|system|>You are"],
            "system (x-anthropic-billing-header)",
        ),
        ({"system": "x-anthropic-billing-header: cch=1;\nYou are"}, ["<|system|>You are"], "system (x-anthropic"),
        ({"messages": [*ASK, {"role": "system", "content": [text("Now.")]}]}, ["Which fox?<|system|>Now."], ""),
        ({"messages": [*ASK, {"role": "system", "content": "Now.", "clear_at": "next_user_message"}]}, ["Now."], ""),
        (
            {"messages": answer({"type": "redacted_thinking", "data": "Zm9v"}, text("Red."))},
            ["<|assistant|>Red.<|user|>"],
            "messages (redacted_thinking)",
        ),
        ({"messages": answer({"type": "thinking", "thinking": "", "signature": ""}, text("Red."))}, ["Red."], ""),
        ({"messages": result(text("found"), IMAGE)}, [f"found\n{NO_IMAGE}"], "messages (image)"),
        ({"messages": result(PDF)}, ["[document left out: this model reads text only]"], "messages (document)"),
        ({"messages": result({"type": "tool_reference", "tool_name": "look"})}, ["look"], ""),
        (
            {
                "messages": user(
                    {
                        "type": "document",
                        "title": "Foxes",
                        "source": {"type": "text", "data": "D", "media_type": "text/plain"},
                    }
                )
            },
            ["Foxes\n\nD"],
            "",
        ),
        (
            {"messages": user({"type": "document", "source": {"type": "content", "content": [text("P"), text("Q")]}})},
            ["P\nQ"],
            "",
        ),
        (
            {"messages": user({"type": "search_result", "source": "a.md", "title": "A", "content": [text("found")]})},
            ["A\na.md\nfound"],
            "",
        ),
        (
            {"messages": user(text("A"), {"type": "container_upload", "file_id": "f"})},
            ["A"],
            "messages (container_upload)",
        ),
        (
            {
                "messages": answer(
                    {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}},
                    {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
                    {**text("Red."), "citations": [{"type": "web_search_result_location", "url": "u"}]},
                )
            },
            ["<|assistant|>Red."],
            "messages (server_tool_use), messages (web_search_tool_result)",
        ),
        (
            {"messages": answer({"type": "compaction", "content": "Before.", "encrypted_content": None})},
            ["Before."],
            "",
        ),
        (
            {
                "messages": answer({**CALL, "caller": {"type": "code_execution_20250825", "tool_id": "s"}})[:2]
                + result()[2:]
            },
            [],
            "",
        ),
        (
            {
                "tools": [
                    {**TOOLS[0], "defer_loading": True, "cache_control": CACHE, "input_examples": [{"q": "ü"}]},
                    {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
                    {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
                    {"type": "mcp_toolset", "mcp_server_name": "m"},
                    {"type": "bash_20250124", "name": "bash", "cache_control": CACHE},
                    {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 9},
                    {"type": "memory_20250818", "name": "memory"},
                ],
                "mcp_servers": [{"type": "url", "name": "m", "url": "https://m.example"}],
            },
            ["Looks it up.", '{\\"q\\": \\"ü\\"}', '"bash"', '"restart"', '"str_replace_based_edit_tool"', '"memory"'],
            "tools[1] (web_search_20250305), tools[2] (tool_search_tool_regex_20251119), tools[3] (mcp_toolset)",
        ),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, [], "thinking.display (omitted)"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9, "block_binding": {}}}, [], ""),
        (
            {
                "context_management": {
                    "edits": [
                        {"type": "clear_thinking_20251015", "keep": "all"},
                        {"type": "clear_tool_uses_20250919", "keep": {"type": "tool_uses", "value": 3}},
                    ]
                }
            },
            [],
            "context_management.edits[1] (clear_tool_uses_20250919)",
        ),
        ({"container": "c1"}, [], "container"),
        ({"container": None, "mcp_servers": [], "speed": "fast", "fallbacks": [{"model": "x"}]}, [], ""),
        ({"output_config": {"effort": "high", "task_budget": {"type": "tokens", "total": 9}}}, [], ""),
        ({"metadata": {"user_id": '{"session_id": "x"}'}, "service_tier": "auto", "cache_control": CACHE}, [], ""),
        ({"max_tokens": 1, "messages": [{"role": "user", "content": "quota"}]}, ["quota"], ""),
    ],
)
def test_a_shape_is_taken(served, tokenizer, changes, shown, left_out):
    client, engine = served
    header, message = ask(client, **changes)
    check(message)
    assert left_out in header if left_out else not header
    prompt = prompt_of(engine, tokenizer)
    for part in shown:
        assert part in prompt
    counted = client._client.post("/v1/messages/count_tokens?beta=true", json=asked(**changes)).json()
    assert counted == {"input_tokens": len(engine.submissions[-1].prompt_token_ids)}


@pytest.mark.parametrize(
    ("images", "taken"), [("refuse", ()), ("results", ("result",)), ("placeholder", ("result", "user"))]
)
def test_images_of_all_apis(make_app, engine, tokenizer, images, taken):
    call = {"id": "t1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    chat_part, input_part = (
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}},
        {"type": "input_image", "image_url": "data:image/png;base64,aGk=", "detail": "auto"},
    )
    bodies = {
        "result": {
            "messages": {"messages": result(IMAGE), "max_tokens": 9},
            "chat/completions": {
                "messages": [
                    *ASK,
                    {"role": "assistant", "tool_calls": [call]},
                    {"role": "tool", "tool_call_id": "t1", "content": [chat_part]},
                ]
            },
            "responses": {
                "input": [
                    *ASK,
                    {"type": "function_call", "call_id": "t1", "name": "look", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "t1", "output": [input_part]},
                ]
            },
        },
        "user": {
            "messages": {"messages": user(IMAGE), "max_tokens": 9},
            "chat/completions": {"messages": user(chat_part)},
            "responses": {"input": user(input_part)},
        },
    }
    with anthropic_client(make_app(images=images)) as client:
        for place, path, body in [(place, *item) for place, paths in bodies.items() for item in paths.items()]:
            response = client._client.post(f"/v1/{path}", json=body)
            if place in taken:
                assert response.status_code == 200
                assert response.headers["x-moeflow-left-out"] == "messages (image)"
                assert NO_IMAGE in prompt_of(engine, tokenizer)
            else:
                assert response.status_code == 400
                assert "--images placeholder" in response.json()["error"]["message"]


def test_a_streamed_answer_has_its_usage_at_the_beginning(client, engine, tokenizer):
    says(engine, tokenizer, TWO)
    engine.num_cached_tokens = 7
    events = list(client.beta.messages.create(**asked(tools=TOOLS, betas=BETAS, stream=True)))
    for event in events:
        check(event)
    usage, num_prompt = events[0].message.usage, len(engine.submissions[-1].prompt_token_ids)
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (num_prompt, 0, 0)
    end = events[-2].usage
    assert (end.input_tokens, end.cache_read_input_tokens) == (num_prompt - 7, 7)


def test_the_older_field_for_the_form_of_the_answer(served):
    client, engine = served
    form = {"type": "json_schema", "schema": {"type": "object", "properties": {"fox": {"type": "string"}}}}
    ask(client, extra_body={"output_format": form})
    assert '"fox"' in engine.submissions[-1].sampling.grammar


def test_a_document_with_images_is_no_text_alone(served):
    client, _ = served
    pages = {"type": "document", "source": {"type": "content", "content": [text("P"), IMAGE]}}
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content\[0\].type: .* 'document'"):
        ask(client, messages=user(pages))
    header, _ = ask(client, messages=result(pages))
    assert header == "messages (document)"


def test_other_requests_of_the_client(app):
    with serve_in_thread(app) as url, anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        assert client._client.head("/").status_code == 200
        assert client._client.post("/api/event_logging/batch", json={}).status_code == 404
        with pytest.raises(anthropic.NotFoundError, match="claude-haiku-4-5"):
            client.beta.messages.create(**asked(model="claude-haiku-4-5"))
