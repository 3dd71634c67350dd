"""`/v1/messages`, as Anthropic's client uses it: blocks in and out, whole and streamed; errors in its words."""

from __future__ import annotations

from itertools import islice

import anthropic
import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from moeflow.engine.generator import Generator
from moeflow.server import sse
from moeflow.server.api.messages.message_object import MESSAGE_EVENTS, MessageObject
from moeflow.server.app import create_app
from moeflow.server.config import ServerConfig
from tests.engine.fakes import byte_level_core, wrap
from tests.server.conftest import connect
from tests.server.conversing import ONE, check_closing_ends_the_work, prompt_of, texts_of
from tests.server.events import read_typed_events
from tests.server.fake_client import NAME, REPLY, FakeClient
from tests.server.live_server import eventually, serve_in_thread
from tests.server.messages.asking import ASK, TOOLS, ask, asked, streamed, without_ids
from tests.server.openai_objects import check
from tests.server.test_tools import TWO, says
from tests.server.thinking_model import TEMPLATE
from tests.tiny_mixtral import EOS


def test_a_text(client, engine):
    engine.num_cached_tokens = 7
    answer = ask(client, extra_body={"temperature": 0.5, "top_k": 3}, metadata={"user_id": "me"})
    check(answer)
    assert [block.text for block in answer.content] == [REPLY]
    assert (answer.stop_reason, answer.stop_sequence, answer.model) == ("end_turn", None, NAME)
    num_prompt = len(engine.submissions[0].prompt_token_ids)
    assert (answer.usage.input_tokens, answer.usage.cache_read_input_tokens) == (num_prompt - 7, 7)
    assert answer.usage.output_tokens == len(REPLY.encode()) + 1
    sampling = engine.submissions[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.max_tokens) == (0.5, 3, 1000)
    assert answer._request_id.startswith("req_")


def test_a_streamed_text(client, engine):
    engine.num_cached_tokens = 7
    assert without_ids(streamed(client)) == without_ids(ask(client))
    kinds = [event.type for event in ask(client, stream=True)]
    assert [kind for kind in kinds if kind != "content_block_delta"] == [
        "message_start",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert kinds.count("content_block_delta") == len(REPLY)


def test_pings_where_nothing_comes_for_long(client, engine, monkeypatch):
    monkeypatch.setattr(sse, "PING_S", 0.02)
    engine.pause_after = 3
    with httpx.stream("POST", f"{client.base_url}/v1/messages", json=asked(stream=True)) as stream:
        lines = stream.iter_lines()
        kinds = [line.removeprefix("event: ") for line in islice(filter(lambda line: "event:" in line, lines), 12)]
    assert kinds[:2] == ["message_start", "ping"]
    assert kinds.count("ping") > 3
    monkeypatch.setattr(sse, "PING_S", 15.0)
    engine.pause_after = None
    assert eventually(lambda: not engine.live)
    assert without_ids(streamed(client)) == without_ids(ask(client))


@pytest.mark.anyio
async def test_the_asyncio_client(app):
    with serve_in_thread(app) as url:
        client = anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0)
        async with client, client.messages.stream(**asked()) as stream:
            assert "".join([text async for text in stream.text_stream]) == REPLY


def test_calls(client, engine, tokenizer):
    says(engine, tokenizer, TWO)
    answer = ask(client, tools=TOOLS)
    check(answer)
    assert answer.stop_reason == "tool_use"
    text, look, go = answer.content
    assert text.text == "Let me see."
    assert (look.name, look.input, go.name, go.input) == ("look", {"q": "the fox"}, "go", {})
    assert look.id != go.id
    assert without_ids(streamed(client, tools=TOOLS)) == without_ids(answer)
    events = ask(client, tools=TOOLS, stream=True)
    deltas = [event.delta.type for event in events if event.type == "content_block_delta"]
    assert deltas.count("input_json_delta") > 10


def test_only_the_first_of_parallel_calls(client, engine, tokenizer):
    says(engine, tokenizer, TWO)
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    assert [block.type for block in ask(client, tools=TOOLS, tool_choice=choice).content] == ["text", "tool_use"]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "go"}])
def test_a_call_can_be_demanded(client, engine, choice):
    ask(client, tools=TOOLS, tool_choice=choice)
    assert engine.submissions[-1].sampling.grammar


def test_without_tools_a_call_is_text(client, engine, tokenizer):
    says(engine, tokenizer, ONE)
    answer = ask(client, tools=TOOLS, tool_choice={"type": "none"})
    assert (answer.content[0].text, answer.stop_reason) == (ONE, "end_turn")
    assert "# Tools" not in prompt_of(engine, tokenizer)


def test_a_round_trip(client, engine, tokenizer):
    """What the client got is sent back with the results, and the model reads both."""
    says(engine, tokenizer, TWO)
    content = ask(client, tools=TOOLS).content
    results = [
        {
            "type": "tool_result",
            "tool_use_id": block.id,
            "content": f"It is {block.name}.",
            "is_error": block.name == "go",
        }
        for block in content
        if block.type == "tool_use"
    ]
    said = {"type": "text", "text": "Go on.", "cache_control": {"type": "ephemeral"}}
    messages = [*ASK, {"role": "assistant", "content": content}, {"role": "user", "content": [*results, said]}]
    says(engine, tokenizer, "Brown.")
    assert ask(client, messages=messages, tools=TOOLS).content[0].text == "Brown."
    prompt = prompt_of(engine, tokenizer)
    places = [prompt.index(text) for text in ("Let me see.", ONE, "It is look.", "Error: It is go.", "Go on.")]
    assert places == sorted(places)


def test_messages_as_the_chat_template_takes_them(thinking):
    client, engine, tokenizer = thinking
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "C"},
                {"type": "text", "text": "D"},
            ],
        },
        {"role": "user", "content": "E"},
    ]
    ask(client, messages=messages, system=[{"type": "text", "text": "S"}, {"type": "text", "text": "T"}])
    assert prompt_of(engine, tokenizer) == "system:S\nTuser:A\nBassistant:CDuser:E"


def test_thinking_is_a_block_of_its_own(thinking):
    client, engine, tokenizer = thinking
    text = '<think>\nHm. So.\n</think>\n\nA fox.[TOOL_CALLS]look[ARGS]{"q": "fox"}'
    engine.reply = [*tokenizer.encode(text, add_special_tokens=False), EOS]
    answer = ask(client, tools=TOOLS, thinking={"type": "adaptive"})
    check(answer)
    thought, said, call = answer.content
    assert (thought.thinking, said.text, call.input) == ("Hm. So.", "A fox.", {"q": "fox"})
    assert thought.signature
    assert len("Hm. So.") <= answer.usage.output_tokens_details.thinking_tokens <= len("Hm. So.") + 4
    assert without_ids(streamed(client, tools=TOOLS)) == without_ids(answer)


@pytest.mark.parametrize(
    ("changes", "end"),
    [
        ({"thinking": {"type": "disabled"}}, "<think></think>"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "user:Which fox?"),
        ({"output_config": {"effort": "high"}}, "high"),
        ({"extra_body": {"chat_template_kwargs": {"begin": True}}}, "<think>"),
    ],
)
def test_templates_get_what_requests_say(thinking, changes, end):
    client, engine, tokenizer = thinking
    ask(client, **changes)
    prompt = tokenizer.decode(engine.submissions[-1].prompt_token_ids, skip_special_tokens=False)
    assert prompt.endswith(end)


def test_a_budget_for_thinking(thinking, client, engine):
    """It binds where it is less than all tokens; a model that does not think keeps to any."""
    thinks, thinker, _ = thinking
    ask(thinks, thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=2000)
    assert thinker.submissions[-1].sampling.grammar
    ask(thinks, thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=1024)
    assert not thinker.submissions[-1].sampling.grammar
    ask(client, thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=2000)
    assert not engine.submissions[-1].sampling.grammar


@pytest.mark.anyio
async def test_a_budget_is_left_out_where_no_token_ends_the_thinking():
    tokenizer = wrap(byte_level_core(), eos_token="<|end|>", chat_template=TEMPLATE)
    engine = FakeClient(tokenizer, max_model_len=4096)
    body = {"messages": ASK, "max_tokens": 2000, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    async with connect(create_app(Generator(engine, tokenizer), ServerConfig())) as http:
        response = await http.post("/v1/messages", json=body)
    assert response.status_code == 200, response.text
    assert response.headers["x-moeflow-left-out"] == "limit of reasoning"
    assert not engine.submissions[-1].sampling.grammar


@pytest.mark.parametrize(
    ("changes", "reason", "sequence"),
    [
        ({"max_tokens": 3}, "max_tokens", None),
        ({"stop_sequences": ["nothing", "world"]}, "stop_sequence", "world"),
        ({"max_tokens": 1000, "extra_body": {"ignore_eos": True}}, "model_context_window_exceeded", None),
    ],
)
def test_reasons_to_end(client, engine, tokenizer, changes, reason, sequence):
    if reason == "model_context_window_exceeded":
        engine.model = msgspec.structs.replace(engine.model, max_model_len=100)
    answer = ask(client, **changes)
    assert (answer.stop_reason, answer.stop_sequence) == (reason, sequence)
    assert without_ids(streamed(client, **changes)) == without_ids(answer)


@pytest.mark.parametrize("cut", ["fox", '{"q', '"look"'])
def test_a_call_that_is_cut_off(client, engine, tokenizer, cut):
    says(engine, tokenizer, ONE)
    answer = ask(client, tools=TOOLS, max_tokens=ONE.index(cut))
    check(answer)
    assert answer.stop_reason == "max_tokens"
    assert without_ids(streamed(client, tools=TOOLS, max_tokens=ONE.index(cut))) == without_ids(answer)


class Fox(BaseModel):
    color: str


def test_the_form_of_the_text(client, engine, tokenizer):
    says(engine, tokenizer, '{"color": "red"}')
    answer = client.messages.parse(**asked(output_format=Fox))
    assert answer.parsed_output == Fox(color="red")
    assert '"color"' in engine.submissions[-1].sampling.grammar


@pytest.mark.parametrize("content", ["Foxes", [{"type": "text", "text": "Fox"}, {"type": "text", "text": "es"}]])
def test_an_answer_that_was_begun_is_continued(client, engine, tokenizer, content):
    messages = [*ASK, {"role": "assistant", "content": content}]
    answer = ask(client, messages=messages, tools=TOOLS)
    assert prompt_of(engine, tokenizer).endswith("Which fox?<|assistant|>Foxes")
    assert [block.text for block in answer.content] == [REPLY]
    assert without_ids(streamed(client, messages=messages, tools=TOOLS)) == without_ids(answer)
    count = client.messages.count_tokens(model=NAME, messages=messages, tools=TOOLS)
    assert count.input_tokens == len(engine.submissions[-1].prompt_token_ids)


def test_what_was_begun_is_behind_the_thinking(thinking):
    client, engine, tokenizer = thinking
    thought = {"type": "thinking", "thinking": "Hm.", "signature": ""}
    begun = {"role": "assistant", "content": [thought, {"type": "text", "text": "The"}]}
    says(engine, tokenizer, " brown one")
    limit = {"type": "enabled", "budget_tokens": 1024}
    answer = ask(client, messages=[*ASK, begun], thinking=limit, max_tokens=2000)
    assert [block.model_dump() for block in answer.content] == [
        {"type": "text", "text": " brown one", "citations": None}
    ]
    assert prompt_of(engine, tokenizer).endswith("The")
    assert not engine.submissions[-1].sampling.grammar


def test_counts_are_those_of_prompts(client, engine):
    ask(client, system="Be brief.", tools=TOOLS)
    count = client.messages.count_tokens(model=NAME, messages=ASK, system="Be brief.", tools=TOOLS)
    check(count)
    assert count.input_tokens == len(engine.submissions[-1].prompt_token_ids)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"messages": []}, "messages: List should have at least 1 item"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\].content: Field required"),
        ({"messages": [{"role": "tool", "content": "x"}]}, r"messages\[0\]: must be an object with a role"),
        ({"messages": [{"role": "user", "content": []}]}, r"messages\[0\].content: List should have at least 1"),
        (
            {"messages": [*ASK, {"role": "assistant", "content": "The "}]},
            "messages: final assistant content cannot end with trailing whitespace",
        ),
        (
            {
                "messages": [
                    *ASK,
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "look", "input": {}}]},
                ]
            },
            "messages: the last message calls tools, so its text is complete",
        ),
        (
            {
                "messages": [*ASK, {"role": "assistant", "content": "The"}],
                "tools": TOOLS,
                "tool_choice": {"type": "any"},
            },
            "tool_choice: an answer that continues the last message cannot be held to a grammar",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            r"messages\[0\].content\[0\].type: .* 'image' are not supported: the model reads text only",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]},
            "blocks of an assistant of type 'tool_result'",
        ),
        ({"system": [{"type": "text", "txet": "x"}]}, r"system\[0\].txet: unknown field 'txet': did you mean 'text'"),
        (
            {"tools": [{"type": "piano_20250124", "name": "piano"}]},
            r"tools\[0\].type: tools of type 'piano_20250124' are not",
        ),
        ({"tools": [{"name": "x"}]}, r"tools\[0\].input_schema: Field required"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "two tools have the same name, 'look'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_x"}]}]},
            "messages: there is a result of the call 'toolu_x', but no earlier message makes this call",
        ),
        ({"tool_choice": {"type": "any"}}, "there are no tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "fly"}}, "none of the tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "required"}}, "choices of type 'required' are not supported"),
        ({"thinking": {"type": "between_tools"}}, "'between_tools' are not supported"),
        ({"thinking": {"type": "adaptive", "display": "x"}}, "thinking.display: Input should be"),
        ({"stop_sequences": [""]}, r"stop_sequences\[0\]: String should have at least 1"),
        ({"max_tokens": 0}, "max_tokens: .* greater than or equal to 1"),
        ({"extra_body": {"max_tokns": 3}}, "did you mean 'max_tokens'"),
        ({"extra_body": {"stop": "x"}}, "did you mean 'stop_sequences'|unknown field 'stop'"),
        ({"extra_body": {"context_management": {"edits": "x"}}}, "context_management.edits: .* valid list"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}], "tool_choice": {"type": "any"}},
            "no tools that",
        ),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "fish"}}}},
            "output_config.format: .*fish",
        ),
    ],
)
def test_what_cannot_be_meant(refusing, changes, reason):
    client, engine = refusing
    with pytest.raises(anthropic.BadRequestError, match=reason) as caught:
        ask(client, **changes)
    assert set(caught.value.body) == {"type", "error", "request_id"}
    assert (caught.value.body["type"], caught.value.body["error"]["type"]) == ("error", "invalid_request_error")
    assert caught.value.body["request_id"] == caught.value.request_id
    assert not engine.submissions


def test_the_clients_own_loop_of_tools(client, engine, tokenizer):
    """It asks for a thread first, and continues without one after the answer that there are none."""
    found = []

    @anthropic.beta_tool
    def look(q: str) -> str:
        """Looks it up.

        Args:
            q: What.
        """
        found.append(q)
        says(engine, tokenizer, "Brown.")
        return "It is brown."

    says(engine, tokenizer, ONE)
    runner = client.beta.messages.tool_runner(**asked(tools=[look]))
    assert [message.stop_reason for message in runner] == ["tool_use", "end_turn"]
    assert found == ["the fox"]
    prompt = prompt_of(engine, tokenizer)
    assert prompt.index(ONE) < prompt.index("It is brown.")


def test_what_asks_for_nothing_is_taken(client):
    ask(
        client,
        thinking={"type": "adaptive", "display": "summarized"},
        service_tier="auto",
        extra_body={"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
    )


def test_other_errors_are_the_clients_own_exceptions(client, engine):
    with pytest.raises(anthropic.NotFoundError) as caught:
        ask(client, model="claude")
    assert caught.value.body["error"]["type"] == "not_found_error"
    engine.fail_after = 2
    with pytest.raises(anthropic.InternalServerError, match="out of memory") as caught:
        ask(client)
    assert caught.value.body["error"]["type"] == "api_error"
    with pytest.raises(anthropic.APIStatusError, match="out of memory"):
        list(ask(client, stream=True))
    engine.die()
    with pytest.raises(anthropic.InternalServerError) as caught:
        ask(client)
    assert caught.value.body["error"]["type"] == "overloaded_error"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("method", "path", "content", "status", "kind"),
    [
        ("GET", "/v1/messages", b"", 405, "invalid_request_error"),
        ("POST", "/v1/messages/batches", b"{}", 404, "not_found_error"),
        ("POST", "/v1/messages", b"{", 400, "invalid_request_error"),
        ("POST", "/v1/messages", b"x" * 2000, 413, "request_too_large"),
    ],
)
async def test_errors_outside_the_endpoint_have_anthropics_shape_too(make_app, method, path, content, status, kind):
    async with connect(make_app(max_body_bytes=1024)) as http:
        headers = {"content-type": "application/json"}
        response = await http.request(method, path, content=content, headers=headers)
    assert response.status_code == status
    assert response.json()["error"]["type"] == kind


def test_a_key_in_either_header(make_app):
    with serve_in_thread(make_app(api_key="right")) as url:
        with anthropic.Anthropic(base_url=url, api_key="right", max_retries=0) as client:
            assert ask(client).content[0].text == REPLY
        with anthropic.Anthropic(base_url=url, auth_token="right", max_retries=0) as client:
            assert ask(client).content[0].text == REPLY
        with (
            anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0) as client,
            pytest.raises(anthropic.AuthenticationError) as caught,
        ):
            ask(client)
        assert caught.value.body["error"]["type"] == "authentication_error"


def test_a_full_queue(make_app, engine):
    engine.pause_after = 1
    with (
        serve_in_thread(make_app(max_queue=0)) as url,
        anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client,
    ):
        streams = [ask(client, stream=True) for _ in range(4)]
        with pytest.raises(anthropic.RateLimitError) as caught:
            ask(client)
        assert int(caught.value.response.headers["retry-after"]) >= 1
        for stream in streams:
            stream.close()


def test_closing_a_stream_ends_the_work(client, engine, app):
    engine.pause_after = 3
    check_closing_ends_the_work(ask(client, stream=True), engine, app)


@pytest.mark.anyio
async def test_answers_and_events_fit_the_document(http: httpx.AsyncClient, engine, tokenizer):
    says(engine, tokenizer, TWO)
    answer = (await http.post("/v1/messages", json=asked(tools=TOOLS))).json()
    assert MessageObject.model_validate(answer, strict=True).model_dump(mode="json") == answer
    stream = await http.post("/v1/messages", json=asked(tools=TOOLS, stream=True))
    events = read_typed_events(stream.text)
    assert events[1] == {"type": "ping"}
    for event in events:
        kind = f"'{event['type']}'"
        (model,) = [model for model in MESSAGE_EVENTS if kind in str(model.model_fields["type"].annotation)]
        model.model_validate(event, strict=True, extra="forbid")


OF_INPUTS = ('{"q": [1, -', "01", "1e999", "{", '"{\\"a\\": 1}"', '"\\ud83d', "null")  # clients take only the objects


@pytest.mark.parametrize("is_parallel", [True, False])
def test_streams_come_to_what_whole_answers_are(client, engine, tokenizer, is_parallel):
    """Whatever the model writes, and however many tokens a pass brings."""

    @settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(texts_of(*OF_INPUTS), st.integers(0, 5), st.integers(1, 120))
    def compare(text, drafts_per_pass, max_tokens):
        says(engine, tokenizer, text)
        engine.drafts_per_pass = drafts_per_pass
        choice = {"type": "auto", "disable_parallel_tool_use": not is_parallel}
        given = {"tools": TOOLS, "tool_choice": choice, "max_tokens": max_tokens}
        answer = ask(client, **given)
        check(answer)
        assert without_ids(streamed(client, **given)) == without_ids(answer)

    compare()
