"""`continue_final_message`: the answer is the rest of the last message."""

from __future__ import annotations

import pytest

from tests.server.conftest import connect
from tests.server.conversing import ONE
from tests.server.events import read_events
from tests.server.fake_client import REPLY, FakeClient
from tests.server.test_tools import says
from tests.server.thinking_model import thinking_model

pytestmark = pytest.mark.anyio

ASK = {"role": "user", "content": "Which fox?"}
BEGUN = {"messages": [ASK, {"role": "assistant", "content": "Foxes "}], "continue_final_message": True}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
STRICT = {"type": "function", "function": {**TOOL["function"], "strict": True}}
PROMPT = "<|user|>Which fox?<|assistant|>Foxes "


@pytest.fixture
def engine(tokenizer):
    return FakeClient(tokenizer, max_model_len=4096)


async def post(http, **body):
    return await http.post("/v1/chat/completions", json=body)


def last_prompt(engine, tokenizer):
    return tokenizer.decode(engine.submissions[-1].prompt_token_ids)


@pytest.mark.parametrize("more", [{}, {"add_generation_prompt": False}, {"tools": [TOOL]}])
async def test_the_answer_has_the_new_text_alone(http, engine, tokenizer, more):
    answer = (await post(http, **BEGUN, **more)).json()
    assert answer["choices"][0]["message"]["content"] == REPLY
    assert last_prompt(engine, tokenizer).endswith("Which fox?<|assistant|>Foxes ")
    assert answer["usage"]["prompt_tokens"] == len(engine.submissions[-1].prompt_token_ids)
    chunks = read_events((await post(http, **BEGUN, **more, stream=True)).text)
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(delta.get("content", "") for delta in deltas) == REPLY


@pytest.mark.parametrize("no", [{}, {"continue_final_message": False}, {"add_generation_prompt": True}])
async def test_without_it_a_new_message_follows(http, engine, tokenizer, no):
    assert (await post(http, messages=BEGUN["messages"], **no)).status_code == 200
    assert last_prompt(engine, tokenizer) == f"{PROMPT}<|assistant|>"


async def test_a_call_behind_the_text(http, engine, tokenizer):
    """A marker that was begun belongs to the call."""
    says(engine, tokenizer, ONE.removeprefix("<tool"))
    messages = [ASK, {"role": "assistant", "content": "I look: <tool"}]
    answer = (await post(http, messages=messages, continue_final_message=True, tools=[TOOL])).json()
    message = answer["choices"][0]["message"]
    assert message["content"] is None
    assert message["tool_calls"][0]["function"]["name"] == "look"


async def test_the_text_is_behind_the_reasoning():
    app, engine, tokenizer = thinking_model()
    says(engine, tokenizer, " brown one")
    begun = {"role": "assistant", "content": "The", "reasoning_content": "Hm."}
    async with connect(app) as http:
        variables = {"begin": True}  # has the template begin to reason where it asks for a message
        answer = await post(
            http,
            messages=[ASK, begun],
            continue_final_message=True,
            chat_template_kwargs=variables,
            thinking_token_budget=3,
        )
    message = answer.json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": " brown one", "refusal": None}


@pytest.mark.parametrize(
    ("changes", "param", "reason"),
    [
        ({"add_generation_prompt": True}, "add_generation_prompt", "is the opposite of continue_final_message"),
        ({"messages": [ASK]}, "messages", "the last message has the role 'user'"),
        (
            {
                "messages": [
                    ASK,
                    {
                        "role": "assistant",
                        "content": "x",
                        "tool_calls": [
                            {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
                        ],
                    },
                ]
            },
            "messages",
            "send the results of the calls",
        ),
        ({"response_format": {"type": "json_object"}}, "response_format", "cannot be held to a grammar"),
        ({"guided_regex": "a+"}, "response_format", "cannot be held to a grammar"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice", "cannot be held to a grammar"),
        ({"tools": [STRICT]}, "tool_choice", "strict tools"),
    ],
)
async def test_what_cannot_be_continued(http, engine, changes, param, reason):
    response = await post(http, **{**BEGUN, **changes})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert reason in error["message"]
    assert not engine.submissions


async def test_a_prompt_is_asked_for_or_a_message_continued(http):
    response = await post(http, messages=[ASK], add_generation_prompt=False)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "add_generation_prompt"


async def test_tokens_are_those_of_the_prompt(http, engine):
    await post(http, **BEGUN)
    counted = await http.post("/tokenize", json=BEGUN)
    assert counted.json()["tokens"] == engine.submissions[-1].prompt_token_ids
    for body in ({"prompt": "x", "continue_final_message": True}, {**BEGUN, "messages": [ASK]}):
        assert (await http.post("/tokenize", json=body)).status_code == 400
