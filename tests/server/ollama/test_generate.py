"""`/api/generate`: a prompt with the chat template or without, and the memory that its answers carry."""

from __future__ import annotations

import pytest

from moeflow.engine.generator import Generator
from moeflow.server.api.ollama.answer_objects import OllamaGenerateResponse
from moeflow.server.app import create_app
from moeflow.server.config import ServerConfig
from tests.engine.fakes import byte_level_core, wrap
from tests.server.conftest import connect
from tests.server.fake_client import NAME, REPLY, FakeClient
from tests.server.ollama.asking import lines_of, without_times
from tests.server.test_tools import says
from tests.tiny_mixtral import EOS

pytestmark = pytest.mark.anyio

ASK = {"model": NAME, "prompt": "Which fox?"}


async def ask(http, **changes):
    response = await http.post("/api/generate", json={**ASK, "stream": False, **changes})
    assert response.status_code == 200, response.text
    return response.json()


async def test_a_prompt_is_a_conversation(http, engine):
    answer = await ask(http, system="Be brief.")
    assert (answer["response"], answer["done"], answer["done_reason"]) == (REPLY, True, "stop")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Which fox?"}]
    await http.post("/api/chat", json={"model": NAME, "messages": messages})
    generated, chatted = engine.submissions
    assert generated.prompt_token_ids == chatted.prompt_token_ids
    assert generated.sampling == chatted.sampling


async def test_lines_say_the_same_as_the_whole_answer(http):
    lines = lines_of(await http.post("/api/generate", json=ASK))
    for line in lines:
        OllamaGenerateResponse.model_validate(line, strict=True, extra="forbid")
    assert [line["done"] for line in lines] == [False] * len(REPLY) + [True]
    text = "".join(line["response"] for line in lines)
    assert without_times({**lines[-1], "response": text}) == without_times(await ask(http))


async def test_a_raw_prompt_is_continued_as_it_stands(http, engine):
    answer = await ask(http, raw=True, options={"num_predict": 40, "temperature": 0.5}, format="json")
    assert answer["response"] == REPLY
    assert "context" not in answer
    form = {"response_format": {"type": "json_object"}}
    completion = {"model": NAME, "prompt": "Which fox?", "max_tokens": 40, "temperature": 0.5, **form}
    await http.post("/v1/completions", json=completion)
    raw, completed = engine.submissions
    assert raw.prompt_token_ids == completed.prompt_token_ids
    assert raw.sampling == completed.sampling


async def test_an_answers_context_goes_before_the_next_prompt(http, engine, tokenizer):
    first = await ask(http)
    reply = [*tokenizer.encode(REPLY, add_special_tokens=False), EOS]
    assert first["context"] == [*engine.submissions[0].prompt_token_ids, *reply]
    second = await ask(http, context=first["context"])
    assert engine.submissions[1].prompt_token_ids == [*first["context"], *engine.submissions[0].prompt_token_ids]
    assert second["context"][: len(first["context"])] == first["context"]


async def test_a_model_without_a_chat_template_continues_the_prompt():
    tokenizer = wrap(byte_level_core(), eos_token="<|end|>")
    engine = FakeClient(tokenizer, max_model_len=4096)
    async with connect(create_app(Generator(engine, tokenizer), ServerConfig())) as http:
        assert (await ask(http))["response"] == REPLY
        assert engine.submissions[0].prompt_token_ids == tokenizer.encode("Which fox?")
        refused = await http.post("/api/generate", json={**ASK, "system": "Be brief."})
        assert (refused.status_code, "no chat template" in refused.json()["error"]) == (400, True)
        shown = (await http.post("/api/show", json={"model": NAME})).json()
        assert shown["capabilities"] == ["completion"]


async def test_thinking_is_a_field_of_its_own(thinking_http):
    http, engine, tokenizer = thinking_http
    says(engine, tokenizer, "<think>\nHm.\n</think>\n\nYes.")
    answer = await ask(http)
    assert (answer["thinking"], answer["response"]) == ("Hm.", "Yes.")
    raw = await ask(http, raw=True)
    assert "thinking" not in raw


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"suffix": "}"}, "suffix is not supported"),
        ({"template": "{{ .Prompt }}"}, "template is not supported"),
        ({"images": ["iVBORw0KGgo="]}, "images is not supported"),
        ({"raw": True, "system": "x"}, "raw mode does not support system or context"),
        ({"raw": True, "context": [3]}, "raw mode does not support system or context"),
        ({"context": [10**6]}, "token id"),
        ({"context": [3], "prompt": ""}, "context needs a prompt"),
        ({"prompt": 3}, "prompt"),
        ({"keep_alive": "soon"}, "keep_alive"),
        ({"think": "hard"}, "think"),
        ({"format": "yaml"}, "format"),
    ],
)
async def test_refusals(http, engine, changes, reason):
    response = await http.post("/api/generate", json={**ASK, **changes})
    assert response.status_code == 400
    assert list(response.json()) == ["error"]
    assert reason in response.json()["error"]
    assert not engine.submissions


async def test_fields_that_ask_for_nothing(http):
    nothing = {"suffix": "", "template": "", "images": [], "system": "", "context": [], "format": "", "raw": False}
    assert (await ask(http, **nothing))["response"] == REPLY


async def test_without_a_prompt_the_model_is_loaded(http, engine):
    for prompt, fields, reason in (
        (None, {}, "load"),
        ("", {"keep_alive": "-1m"}, "load"),
        ("", {"keep_alive": "0s"}, "unload"),
    ):
        answer = await ask(http, prompt=prompt, **fields)
        assert (answer["response"], answer["done"], answer["done_reason"]) == ("", True, reason)
    assert not engine.submissions
