"""`/v1/responses`, as the official client uses it: items in and out, whole and streamed, refusals."""

from __future__ import annotations

import httpx
import openai
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from moeflow.server.api.responses.response_object import RESPONSE_EVENTS, ResponseObject
from tests.server.conftest import connect
from tests.server.conversing import ONE, check_closing_ends_the_work, prompt_of, texts_of
from tests.server.events import read_typed_events
from tests.server.fake_client import NAME, REPLY
from tests.server.openai_objects import check
from tests.server.responses.asking import TOOLS, ask, streamed, without_ids
from tests.server.test_tools import TWO, says
from tests.tiny_mixtral import EOS


def test_a_text(client, engine):
    engine.num_cached_tokens = 7
    answer = ask(client, instructions="Be brief.", temperature=0.5, top_p=0.9, metadata={"a": "b"}, user="me")
    check(answer)
    assert answer.output_text == REPLY
    assert (answer.status, answer.temperature, answer.top_p, answer.metadata) == ("completed", 0.5, 0.9, {"a": "b"})
    assert (answer.instructions, answer.tool_choice, answer.user) == ("Be brief.", "auto", "me")
    assert answer.usage.output_tokens == len(REPLY.encode()) + 1
    assert answer.usage.input_tokens_details.cached_tokens == 7
    assert engine.submissions[0].sampling.temperature == 0.5


def test_a_streamed_text(client):
    final, kinds = streamed(client)
    assert without_ids(final) == without_ids(ask(client))
    assert [kind for kind in kinds if kind != "response.output_text.delta"] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert kinds.count("response.output_text.delta") == len(REPLY)


def test_calls(client, engine, tokenizer):
    says(engine, tokenizer, TWO)
    answer = ask(client, tools=TOOLS)
    check(answer)
    assert [item.type for item in answer.output] == ["message", "function_call", "function_call"]
    assert answer.output_text == "Let me see."
    calls = answer.output[1:]
    assert [(call.name, call.arguments) for call in calls] == [("look", '{"q": "the fox"}'), ("go", "{}")]
    assert len({call.call_id for call in calls}) == len({call.id for call in calls}) == 2
    final, kinds = streamed(client, tools=TOOLS)
    assert without_ids(final) == without_ids(answer)
    assert kinds.count("response.function_call_arguments.delta") > 10
    assert kinds.count("response.function_call_arguments.done") == 2


def test_only_the_first_of_parallel_calls(client, engine, tokenizer):
    says(engine, tokenizer, TWO)
    answer = ask(client, tools=TOOLS, parallel_tool_calls=False)
    assert [item.type for item in answer.output] == ["message", "function_call"]
    assert answer.parallel_tool_calls is False


def test_a_round_trip(client, engine, tokenizer):
    """What the client got is sent back with the result, and the model reads both."""
    says(engine, tokenizer, TWO)
    output = ask(client, tools=TOOLS).output
    results = [
        {"type": "function_call_output", "call_id": call.call_id, "output": f"It is {call.name}."}
        for call in output
        if call.type == "function_call"
    ]
    says(engine, tokenizer, "Brown.")
    answer = ask(client, input=[{"role": "user", "content": "Which fox?"}, *output, *results], tools=TOOLS)
    assert answer.output_text == "Brown."
    prompt = prompt_of(engine, tokenizer)
    places = [prompt.index(text) for text in ("Let me see.", ONE, "It is look.", "It is go.")]
    assert places == sorted(places)


def test_messages_as_the_chat_template_takes_them(thinking):
    client, engine, tokenizer = thinking
    items = [
        {"role": "developer", "content": "Rules."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "A"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "B", "annotations": []}]},
        {"role": "assistant", "content": "C"},
        {"role": "user", "content": [{"type": "input_text", "text": "D"}, {"type": "input_text", "text": "E"}]},
    ]
    ask(client, input=items, instructions="First.")
    assert prompt_of(engine, tokenizer) == "system:First.\n\nRules.user:Aassistant:Bassistant:Cuser:DE"


def test_an_answer_that_is_cut_off(client, engine, tokenizer):
    says(engine, tokenizer, ONE)
    answer = ask(client, tools=TOOLS, max_output_tokens=ONE.index("fox"))
    check(answer)
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert (answer.output[0].arguments, answer.output[0].status) == ('{"q": "the ', "incomplete")
    *_, last = ask(client, tools=TOOLS, max_output_tokens=ONE.index("fox"), stream=True)
    assert last.type == "response.incomplete"
    assert without_ids(last.response) == without_ids(answer)


def test_an_answer_of_nothing_is_an_empty_message(client, engine):
    engine.reply = [EOS]
    answer = ask(client)
    assert answer.output_text == ""
    assert [item.type for item in answer.output] == ["message"]
    assert without_ids(streamed(client)[0]) == without_ids(answer)


def test_reasoning_is_an_item_of_its_own(thinking):
    client, engine, tokenizer = thinking
    text = '<think>\nHm. So.\n</think>\n\nA fox.[TOOL_CALLS]look[ARGS]{"q": "fox"}'
    engine.reply = [*tokenizer.encode(text, add_special_tokens=False), EOS]
    answer = ask(client, tools=TOOLS, include=["reasoning.encrypted_content"])
    check(answer)
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]
    assert answer.output[0].content[0].text == "Hm. So."
    assert answer.output_text == "A fox."
    details = answer.usage.output_tokens_details
    assert len("Hm. So.") <= details.reasoning_tokens <= len("Hm. So.") + 4
    final, kinds = streamed(client, tools=TOOLS, include=["reasoning.encrypted_content"])
    assert without_ids(final) == without_ids(answer)
    assert kinds.count("response.reasoning_text.delta") >= 5
    assert "response.reasoning_text.done" in kinds


@pytest.mark.parametrize(
    ("changes", "end"),
    [({"reasoning": {"effort": "high", "summary": "auto"}}, "high"), ({"reasoning": {"effort": "none"}}, "none")],
)
def test_templates_get_the_effort(thinking, changes, end):
    client, engine, tokenizer = thinking
    answer = ask(client, **changes)
    assert prompt_of(engine, tokenizer).endswith(end)
    assert answer.reasoning.effort == end


@pytest.mark.parametrize("drafts_per_pass", [0, 5])
def test_log_probabilities_are_those_of_the_text(thinking, drafts_per_pass):
    """Not those of reasoning, of calls, or of the text between them."""
    client, engine, tokenizer = thinking
    engine.drafts_per_pass = drafts_per_pass
    text = '<think>\nHm. So.\n</think>\n\nA föx.[TOOL_CALLS]look[ARGS]{"q": "fox"}'
    engine.reply = [*tokenizer.encode(text, add_special_tokens=False), EOS]
    given = {"tools": TOOLS, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    answer = ask(client, **given)
    check(answer)
    assert answer.top_logprobs == 2
    tokens = answer.output[1].content[0].logprobs
    said = b"".join(bytes(token.bytes) for token in tokens).decode()
    assert "A föx." in said
    assert said == "A föx." or drafts_per_pass, "a token may reach beyond its text where several come at once"
    for token in tokens:
        assert (token.logprob, len(token.top_logprobs), token.top_logprobs[0].logprob) == (-1.5, 2, -0.25)
    assert engine.submissions[-1].sampling.logprobs == 2
    events = list(ask(client, **given, stream=True))
    for event in events:
        check(event)
    told = [token for event in events if event.type == "response.output_text.delta" for token in event.logprobs]
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    assert [token.token for token in told] == [token.token for token in done.logprobs] == [one.token for one in tokens]
    assert without_ids(events[-1].response) == without_ids(answer)
    assert without_ids(streamed(client, **given)[0]) == without_ids(answer)


def test_log_probabilities_without_others_and_none_unless_asked_for(client, engine):
    answer = ask(client, include=["message.output_text.logprobs"])
    tokens = answer.output[0].content[0].logprobs
    assert b"".join(bytes(token.bytes) for token in tokens).decode() == REPLY
    assert not any(token.top_logprobs for token in tokens)
    assert ask(client).output[0].content[0].logprobs == []
    assert engine.submissions[-1].sampling.logprobs is None


class Fox(BaseModel):
    color: str


def test_the_form_of_the_text(client, engine, tokenizer):
    says(engine, tokenizer, '{"color": "red"}')
    answer = client.responses.parse(model=NAME, input="Which fox?", text_format=Fox)
    assert answer.output_parsed == Fox(color="red")
    assert '"color"' in engine.submissions[-1].sampling.grammar
    assert answer.text.format.name == "Fox"
    ask(client, text={"format": {"type": "json_object"}})
    assert engine.submissions[-1].sampling.grammar
    ask(client, text={"format": {"type": "text"}})
    assert not engine.submissions[-1].sampling.grammar


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "go"}])
def test_a_call_can_be_demanded(client, engine, choice):
    answer = ask(client, tools=TOOLS, tool_choice=choice)
    assert engine.submissions[-1].sampling.grammar
    assert (answer.tool_choice if isinstance(choice, str) else answer.tool_choice.model_dump()) == choice


def test_without_tools_a_call_is_text(client, engine, tokenizer):
    says(engine, tokenizer, ONE)
    assert ask(client, tools=TOOLS, tool_choice="none").output_text == ONE
    assert "# Tools" not in prompt_of(engine, tokenizer)


@pytest.mark.parametrize(
    ("changes", "param", "reason"),
    [
        ({"input": [{"role": "user"}]}, "input[0].content", "Field required"),
        ({"input": [{"role": "nobody", "content": "x"}]}, "input[0].role", "user"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "previous_response_id"),
        ({"input": [{"type": "telepathy"}]}, "input[0].type", "'telepathy' are not supported"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
            "text only",
        ),
        ({"input": [{"role": "user", "content": "x", "contnt": 1}]}, "input[0].contnt", "did you mean 'content'"),
        ({"tools": [{"type": "telepathy"}]}, "tools[0].type", "tools of type 'telepathy' are not supported"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", "pattern"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools", "two tools have the same name"),
        (
            {"input": [{"type": "function_call_output", "call_id": "x", "output": ""}]},
            "input",
            "of the call 'x', but no",
        ),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "fly"}}, "tool_choice", "none of the tools"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "'xml' are not supported"),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "fish"}}}},
            "text.format",
            "fish",
        ),
        ({"text": {"verbosity": "loud"}}, "text.verbosity", "low, medium or high"),
        ({"truncation": "middle"}, "truncation", "disabled"),
        ({"background": True}, "background", "not supported"),
        ({"conversation": "conv_1"}, "conversation", "not supported"),
        ({"top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
        ({"extra_body": {"max_tokens": 5}}, "max_tokens", "did you mean"),
        ({"extra_body": {"response_format": {"type": "text"}}}, "response_format", "unknown field"),
        ({"temperature": 3}, "temperature", "less than or equal to 2"),
        ({"extra_body": {"stream_options": {}}}, "stream_options", "stream: true"),
    ],
)
def test_what_cannot_be_meant(refusing, changes, param, reason):
    client, engine = refusing
    with pytest.raises(openai.BadRequestError, match=reason) as caught:
        ask(client, **changes)
    assert caught.value.param == param
    assert not engine.submissions


def test_a_failure_within_a_stream(client, engine):
    engine.fail_after = 2
    *_, last = ask(client, stream=True)
    assert last.type == "response.failed"
    assert last.response.status == "failed"
    assert (last.response.error.code, last.response.error.message) == ("server_error", "out of memory")
    check(last)
    with pytest.raises(openai.InternalServerError, match="out of memory"):
        ask(client)


def test_closing_a_stream_ends_the_work(client, engine, app):
    engine.pause_after = 3
    check_closing_ends_the_work(ask(client, stream=True), engine, app)


@pytest.mark.anyio
async def test_answers_and_events_fit_the_document(http: httpx.AsyncClient, engine, tokenizer):
    says(engine, tokenizer, TWO)
    answer = (await http.post("/v1/responses", json={"input": "Hi", "tools": TOOLS})).json()
    assert ResponseObject.model_validate(answer, strict=True).model_dump(mode="json") == answer
    stream = await http.post("/v1/responses", json={"input": "Hi", "tools": TOOLS, "stream": True})
    for event in read_typed_events(stream.text):
        fitting = [model for model in RESPONSE_EVENTS if event["type"] in str(model.model_fields["type"].annotation)]
        assert len(fitting) == 1
        fitting[0].model_validate(event, strict=True, extra="forbid")


@pytest.mark.parametrize("is_parallel", [True, False])
def test_streams_come_to_what_whole_answers_are(client, engine, tokenizer, is_parallel):
    """Whatever the model writes, and however many tokens a pass brings."""

    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(texts_of(), st.integers(0, 5), st.none() | st.integers(1, 60))
    @example('<tool_call>{"name": "look", "arguments": <tool_call>', 0, None)  # what ends the call is text
    def compare(text, drafts_per_pass, max_tokens):
        says(engine, tokenizer, text)
        engine.drafts_per_pass = drafts_per_pass
        given = {"tools": TOOLS, "parallel_tool_calls": is_parallel, "max_output_tokens": max_tokens, "top_logprobs": 1}
        answer = ask(client, **given)
        check(answer)
        *events, last = ask(client, **given, stream=True)
        assert without_ids(last.response) == without_ids(answer)
        done = [event.item for event in events if event.type == "response.output_item.done"]
        assert done == last.response.output
        texts = {}
        for event in events:
            if event.type in ("response.output_text.delta", "response.function_call_arguments.delta"):
                texts[event.output_index] = texts.get(event.output_index, "") + event.delta
        for index, item in enumerate(done):
            said = item.arguments if item.type == "function_call" else item.content[0].text
            assert texts.get(index, "") == said
            if item.type == "message":
                tokens = b"".join(bytes(token.bytes) for token in item.content[0].logprobs)
                assert said.replace("\ufffd", "").encode() in tokens
        if answer.status == "completed":
            assert without_ids(streamed(client, **given)[0]) == without_ids(answer)

    compare()


@pytest.mark.anyio
async def test_prompts_are_logged_where_that_is_wanted(make_app, caplog):
    async with connect(make_app(log_prompts=True)) as http:
        with caplog.at_level("INFO"):
            await http.post("/v1/responses", json={"input": "Hi", "instructions": "Be brief."})
    (record,) = [record for record in caplog.records if record.name.endswith("request_log")]
    assert record.fields["prompt"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert record.fields["end"] == "stop"
