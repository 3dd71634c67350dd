from __future__ import annotations

import pytest

from tests.server.events import read_events
from tests.server.fake_client import NAME, REPLY

pytestmark = pytest.mark.anyio


async def complete(http, **body):
    response = await http.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 100, **body})
    assert response.status_code == 200, response.text
    return response.json()


async def stream(http, **body):
    response = await http.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 100, "stream": True, **body})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return read_events(response.text)


async def test_a_whole_answer(http, engine):
    engine.num_cached_tokens = 3
    answer = await complete(http)
    assert answer.pop("id").startswith("cmpl-")
    assert answer.pop("created") > 1_700_000_000
    num_tokens = len(REPLY.encode()) + 1
    assert answer == {
        "object": "text_completion",
        "model": NAME,
        "choices": [{"index": 0, "text": REPLY, "logprobs": None, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": 5,
            "completion_tokens": num_tokens,
            "total_tokens": 5 + num_tokens,
            "prompt_tokens_details": {"cached_tokens": 3},
            "completion_tokens_details": {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0},
        },
    }


async def test_16_tokens_unless_said_otherwise(http):
    response = await http.post("/v1/completions", json={"prompt": "Hello", "ignore_eos": True})
    body = response.json()
    assert body["usage"]["completion_tokens"] == 16
    assert body["choices"][0]["finish_reason"] == "length"


async def test_text_streams_in_whole_characters(http):
    chunks = await stream(http)
    pieces = [chunk["choices"][0]["text"] for chunk in chunks]
    assert "".join(pieces) == REPLY
    assert pieces[:-1] == list(REPLY)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [["a", "b"]]),
        (["ab", "c"], [["a", "b"], ["c"]]),
        ("ids", [["i", "d", "s"]]),
    ],
)
async def test_prompts_reach_the_engine(http, engine, tokenizer, prompt, expected):
    await complete(http, prompt=prompt)
    seen = [[tokenizer.token_bytes(i).decode() for i in s.prompt_token_ids] for s in engine.submissions]
    assert sorted(seen) == sorted(expected)


@pytest.mark.parametrize(("prompt", "expected"), [([5, 6], [[5, 6]]), ([[5, 6], [7]], [[5, 6], [7]])])
async def test_token_ids_reach_the_engine(http, engine, prompt, expected):
    await complete(http, prompt=prompt)
    assert sorted(s.prompt_token_ids for s in engine.submissions) == expected


async def test_every_parameter_reaches_the_engine(http, engine):
    fields = {
        "max_tokens": 7,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_k": 9,
        "top_p": 0.75,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.25,
        "logprobs": 3,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
    }
    await complete(http, **fields, seed=11, stop="never", stop_token_ids=[3], logit_bias={"4": -100, "5": 2.5})
    (submission,) = engine.submissions
    assert {name: getattr(submission.sampling, name) for name in fields} == fields
    assert submission.sampling.seed == 11
    assert submission.sampling.stop == ("never",)
    assert submission.sampling.stop_token_ids == (3,)
    assert submission.sampling.logit_bias == {4: -100.0, 5: 2.5}


@pytest.mark.parametrize("stop", ["world", ["nothing", "world"]])
async def test_stop_strings_end_the_text_and_the_work(http, engine, stop):
    answer = await complete(http, stop=stop)
    assert answer["choices"][0]["text"] == "Grüße, "
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert len(engine.cancelled) == 1


async def test_logprobs_are_parallel_lists(http):
    answer = await complete(http, logprobs=2, max_tokens=3)
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["G", "r", "bytes:\\xc3"]
    assert logprobs["token_logprobs"] == [-1.5] * 3
    assert [set(top) for top in logprobs["top_logprobs"]] == [{"F", "G"}, {"q", "r"}, {"bytes:\\xc2", "bytes:\\xc3"}]
    assert logprobs["top_logprobs"][0] == {"F": -0.25, "G": -1.5}
    assert logprobs["text_offset"] == [0, 1, 2]


async def test_logprobs_of_what_cannot_happen_are_numbers(http):
    answer = await complete(http, logprobs=3, max_tokens=1)
    assert min(answer["choices"][0]["logprobs"]["top_logprobs"][0].values()) == -9999.0


async def test_offsets_point_at_the_tokens(http):
    whole = await complete(http, logprobs=0, echo=True)
    (choice,) = whole["choices"]
    text, logprobs = choice["text"], choice["logprobs"]
    for token, offset in zip(logprobs["tokens"][:-1], logprobs["text_offset"], strict=False):
        if not token.startswith("bytes:"):
            assert text[offset] == token


@pytest.mark.parametrize("prompt", ["Hé", [35, 105]])
async def test_echo_begins_with_the_prompt(http, tokenizer, prompt):
    text = prompt if isinstance(prompt, str) else tokenizer.decode(prompt)
    answer = await complete(http, prompt=prompt, echo=True, n=2)
    assert [choice["text"] for choice in answer["choices"]] == [text + REPLY] * 2
    chunks = await stream(http, prompt=prompt, echo=True)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text + REPLY


async def test_echo_with_logprobs_scores_the_prompt(http):
    whole = await complete(http, prompt="Hé", echo=True, logprobs=1, max_tokens=2, n=2)
    expected = {
        "tokens": ["H", "bytes:\\xc3", "bytes:\\xa9", "G", "r"],
        "token_logprobs": [None, -1.5, -1.5, -1.5, -1.5],
        "text_offset": [0, 1, 2, 2, 3],
    }
    for choice in whole["choices"]:
        logprobs = choice["logprobs"]
        assert {name: logprobs[name] for name in expected} == expected
        assert logprobs["top_logprobs"][0] is None
        assert logprobs["top_logprobs"][3] == {"F": -0.25, "G": -1.5}


async def test_a_streamed_echo_scores_the_prompt_too(http):
    whole = await complete(http, prompt="Hé", echo=True, logprobs=1, max_tokens=5)
    chunks = await stream(http, prompt="Hé", echo=True, logprobs=1, max_tokens=5)
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        streamed = [item for chunk in chunks for item in chunk["choices"][0]["logprobs"][name]]
        assert streamed == whole["choices"][0]["logprobs"][name]


async def test_no_tokens_at_all_just_scores(http):
    answer = await complete(http, prompt="Hi", echo=True, logprobs=0, max_tokens=0)
    (choice,) = answer["choices"]
    assert choice["text"] == "Hi"
    assert choice["logprobs"]["token_logprobs"] == [None, -1.5]
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("field", ["user", "metadata", "n", "best_of", "stop", "seed", "logit_bias", "suffix", "echo"])
async def test_null_is_as_if_absent(http, field):
    await complete(http, **{field: None})


async def test_neutral_fields_are_taken(http):
    await complete(http, user="me", metadata={"a": "b"}, suffix="", best_of=1, n=2)
