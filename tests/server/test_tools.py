"""Tools and reasoning over HTTP, as the official client sees them: calls whole and streamed, results, refusals."""

from __future__ import annotations

import json

import openai
import pytest

from moeflow.text.tokenizer import Tokenizer
from tests.server.conversing import ONE
from tests.server.events import read_events
from tests.server.fake_client import NAME, FakeClient
from tests.server.openai_objects import check
from tests.tiny_mixtral import EOS

ASK = [{"role": "user", "content": "Which fox?"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Looks it up.",
            "parameters": {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]},
        },
    },
    {"type": "function", "function": {"name": "go"}},
]
TWO = f'Let me see.\n{ONE}\n<tool_call>\n{{"name": "go", "arguments": {{}}}}\n</tool_call>'


@pytest.fixture
def engine(tokenizer: Tokenizer) -> FakeClient:
    return FakeClient(tokenizer, max_model_len=4096)


def says(engine: FakeClient, tokenizer: Tokenizer, text: str) -> None:
    engine.reply = [*tokenizer.encode(text, add_special_tokens=False), EOS]


def ask(client, **changes):
    return client.chat.completions.create(**{"model": NAME, "messages": ASK, "tools": TOOLS, **changes})


def gathered(chunks):
    """Join streamed calls as clients do."""
    calls, text = [], ""
    for chunk in chunks:
        delta = chunk.choices[0].delta
        text += delta.content or ""
        for call in delta.tool_calls or ():
            if call.index == len(calls):
                assert call.id
                assert call.type == "function"
                calls.append([call.id, call.function.name, call.function.arguments])
            else:
                assert call.id is None
                assert call.function.name is None
                calls[call.index][2] += call.function.arguments
    return calls, text


def test_calls(client, engine, tokenizer):
    says(engine, tokenizer, TWO)
    answer = ask(client)
    check(answer)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    assert [(call.function.name, call.function.arguments) for call in choice.message.tool_calls] == [
        ("look", '{"q": "the fox"}'),
        ("go", "{}"),
    ]
    assert len({call.id for call in choice.message.tool_calls}) == 2


def test_a_call_alone_has_no_content(client, engine, tokenizer):
    says(engine, tokenizer, ONE)
    assert ask(client).choices[0].message.content is None


def test_streamed_calls(client, engine, tokenizer):
    says(engine, tokenizer, TWO)
    chunks = list(ask(client, stream=True))
    for chunk in chunks:
        check(chunk)
    calls, text = gathered(chunks)
    assert text == "Let me see."
    assert [call[1:] for call in calls] == [["look", '{"q": "the fox"}'], ["go", "{}"]]
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["tool_calls"]
    num_pieces = sum(bool(chunk.choices[0].delta.tool_calls) for chunk in chunks)
    assert num_pieces > 10, "arguments come as they are generated"


def test_several_answers_have_calls_of_their_own(client, engine, tokenizer):
    says(engine, tokenizer, ONE)
    answer = ask(client, n=2)
    assert len({choice.message.tool_calls[0].id for choice in answer.choices}) == 2


def test_only_the_first_of_parallel_calls(client, engine, tokenizer):
    says(engine, tokenizer, TWO)
    assert len(ask(client, parallel_tool_calls=False).choices[0].message.tool_calls) == 1
    assert len(gathered(ask(client, parallel_tool_calls=False, stream=True))[0]) == 1


def test_a_call_that_is_cut_off_ends_by_length(client, engine, tokenizer):
    says(engine, tokenizer, ONE)
    choice = ask(client, max_tokens=ONE.index("fox")).choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls[0].function.arguments == '{"q": "the '


def test_a_round_trip(client, engine, tokenizer):
    """What the client got is sent back with the result, and the model reads both."""
    says(engine, tokenizer, ONE)
    message = ask(client).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "It is brown."}
    says(engine, tokenizer, "Brown.")
    answer = ask(client, messages=[*ASK, message, result])
    assert answer.choices[0].message.content == "Brown."
    prompt = tokenizer.decode(engine.submissions[-1].prompt_token_ids)
    assert ONE in prompt
    assert "It is brown." in prompt
    assert prompt.index(ONE) < prompt.index("It is brown.")


def test_without_tools_a_call_is_text(client, engine, tokenizer):
    says(engine, tokenizer, ONE)
    for changes in ({"tools": openai.NOT_GIVEN}, {"tool_choice": "none"}):
        choice = ask(client, **changes).choices[0]
        assert choice.message.content == ONE
        assert choice.message.tool_calls is None
        assert choice.finish_reason == "stop"
        assert "# Tools" not in tokenizer.decode(engine.submissions[-1].prompt_token_ids)


def test_logprobs_are_of_all_tokens(client, engine, tokenizer):
    says(engine, tokenizer, ONE)
    tokens = [
        token
        for chunk in ask(client, stream=True, logprobs=True)
        if chunk.choices[0].logprobs
        for token in chunk.choices[0].logprobs.content
    ]
    assert len(tokens) == len(engine.reply)


@pytest.mark.parametrize(
    ("changes", "param", "reason"),
    [
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type", "functions only"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "pattern"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools", "two tools have the same name"),
        ({"messages": [{"role": "tool", "tool_call_id": "x", "content": ""}]}, "messages", "of the call 'x', but no"),
        ({"tool_choice": {"type": "function", "function": {"name": "fly"}}}, "tool_choice", "none of the tools"),
        ({"tool_choice": "perhaps"}, "tool_choice", "must be none, auto, required"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"extra_body": {"chat_template_kwargs": {"messages": []}}}, "chat_template_kwargs", "may not set 'messages'"),
    ],
)
def test_what_cannot_be_meant(client, engine, changes, param, reason):
    with pytest.raises(openai.BadRequestError, match=reason) as caught:
        ask(client, **changes)
    assert caught.value.param == param
    assert not engine.submissions


def test_reasoning_stands_apart(thinking):
    client, engine, tokenizer = thinking
    engine.reply = [*tokenizer.encode("<think>\nHm.\n</think>\n\nA <other>fox.", add_special_tokens=False), EOS]
    message = ask(client, tools=openai.NOT_GIVEN).choices[0].message
    assert message.content == "A fox."
    assert message.reasoning_content == "Hm."
    chunks = list(ask(client, tools=openai.NOT_GIVEN, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Hm."
    assert "".join(delta.content or "" for delta in deltas) == "A fox."


def test_markers_that_are_special_tokens_are_seen(thinking):
    client, engine, tokenizer = thinking
    text = 'Hm.</think>Yes.<other>[TOOL_CALLS]look[ARGS]{"q": "fox"}'
    engine.reply = [*tokenizer.encode(text, add_special_tokens=False), EOS]
    message = ask(client, extra_body={"chat_template_kwargs": {"begin": True}}).choices[0].message
    assert (message.reasoning_content, message.content) == ("Hm.", "Yes.")
    assert json.loads(message.tool_calls[0].function.arguments) == {"q": "fox"}
    assert len(message.tool_calls[0].id) == 9
    message = ask(client, tools=openai.NOT_GIVEN).choices[0].message
    assert message.content == 'Hm.</think>Yes.look{"q": "fox"}', "without tools, calls have no marks"


@pytest.mark.parametrize(
    ("changes", "end"),
    [
        ({"reasoning_effort": "high"}, "high"),
        ({"reasoning_effort": "none"}, "none<think></think>"),
        ({"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}, "<think></think>"),
        ({"reasoning_effort": "low", "extra_body": {"chat_template_kwargs": {"reasoning_effort": "x"}}}, "x"),
    ],
)
def test_templates_get_what_requests_say(thinking, changes, end):
    client, engine, tokenizer = thinking
    ask(client, tools=openai.NOT_GIVEN, **changes)
    prompt = tokenizer.decode(engine.submissions[-1].prompt_token_ids, skip_special_tokens=False)
    assert prompt == f"user:Which fox?{end}"


@pytest.mark.anyio
async def test_in_a_stream_of_events(http, engine, tokenizer):
    says(engine, tokenizer, ONE)
    response = await http.post("/v1/chat/completions", json={"messages": ASK, "tools": TOOLS, "stream": True})
    deltas = [chunk["choices"][0]["delta"] for chunk in read_events(response.text)]
    begun = deltas[1]["tool_calls"]
    assert deltas[0] == {"role": "assistant", "content": "", "refusal": None}
    assert begun == [
        {"index": 0, "id": begun[0]["id"], "type": "function", "function": {"name": "look", "arguments": ""}}
    ]
    assert deltas[2] == {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}
    assert deltas[-1] == {}
