"""The official client, unchanged: the server understands its requests, and it understands answers, errors included."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import openai
import pytest
from fastapi import FastAPI
from openai.types import Completion
from openai.types.chat import ChatCompletion

from tests.server.fake_client import NAME, REPLY
from tests.server.live_server import eventually, serve_in_thread
from tests.server.openai_objects import check

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def url(app: FastAPI) -> Iterator[str]:
    with serve_in_thread(app) as url:
        yield f"{url}/v1"


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def test_chat(client):
    answer = client.chat.completions.create(model=NAME, messages=HELLO, n=2, logprobs=True, top_logprobs=2)
    assert isinstance(answer, ChatCompletion)
    check(answer)
    assert [choice.message.content for choice in answer.choices] == [REPLY] * 2
    assert answer.choices[0].logprobs.content[0].top_logprobs[0].bytes == [70]
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_the_clients_own_stream_helper(client):
    with client.chat.completions.stream(model=NAME, messages=HELLO) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_completion()
    assert final.choices[0].message.content == REPLY
    assert final.choices[0].finish_reason == "stop"
    assert "content.done" in events


def test_completions(client):
    answer = client.completions.create(model=NAME, prompt=["a", "b"], n=2, max_tokens=4, logprobs=1, seed=3)
    assert isinstance(answer, Completion)
    check(answer)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    streamed = dict.fromkeys(range(4), "")
    for chunk in client.completions.create(model=NAME, prompt=["a", "b"], n=2, max_tokens=4, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == {choice.index: choice.text for choice in answer.choices}


def test_our_own_parameters_go_through_extra_body(client, engine):
    extra = {"top_k": 3, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True, "stop_token_ids": [7]}
    client.completions.create(model=NAME, prompt="x", max_tokens=1, extra_body=extra)
    sampling = engine.submissions[0].sampling
    assert (sampling.top_k, sampling.min_p, sampling.ignore_eos) == (3, 0.1, True)


@pytest.mark.anyio
async def test_the_asyncio_client(url):
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        answer = await client.chat.completions.create(model=NAME, messages=HELLO)
        assert answer.choices[0].message.content == REPLY
        stream = await client.chat.completions.create(model=NAME, messages=HELLO, stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == REPLY


def test_closing_a_stream_ends_the_work(client, engine, app):
    engine.pause_after = 3
    stream = client.chat.completions.create(model=NAME, messages=HELLO, stream=True)
    next(iter(stream))
    stream.close()
    assert eventually(lambda: not engine.live and app.state.service.models.num_unfinished == 0)
    assert len(engine.cancelled) == 1


@pytest.mark.parametrize(
    ("error", "request_"),
    [
        (openai.BadRequestError, lambda c: c.completions.create(model=NAME, prompt="x", temperature=-1)),
        (openai.BadRequestError, lambda c: c.chat.completions.create(model=NAME, messages=[])),
        (openai.NotFoundError, lambda c: c.chat.completions.create(model="gpt-4o", messages=HELLO)),
        (openai.NotFoundError, lambda c: c.models.retrieve("gpt-4o")),
        (openai.NotFoundError, lambda c: c.moderations.create(model=NAME, input="x")),
    ],
)
def test_refusals_are_the_clients_own_exceptions(client, error, request_: Callable[[openai.OpenAI], object]):
    with pytest.raises(error) as caught:
        request_(client)
    assert caught.value.body["message"] in str(caught.value)
    assert caught.value.code


def test_a_wrong_key(make_app):
    with serve_in_thread(make_app(api_key="right")) as url:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="wrong") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
        with openai.OpenAI(base_url=f"{url}/v1", api_key="right") as client:
            assert client.models.list().data[0].id == NAME


def test_a_full_queue(make_app, engine):
    engine.pause_after = 1
    with (
        serve_in_thread(make_app(max_queue=0)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        stream = client.completions.create(model=NAME, prompt="x", n=4, stream=True)
        with pytest.raises(openai.RateLimitError):
            client.completions.create(model=NAME, prompt="x")
        stream.close()


def test_a_failure_within_a_stream_is_an_exception(client, engine):
    engine.fail_after = 2
    stream = client.chat.completions.create(model=NAME, messages=HELLO, stream=True)
    with pytest.raises(openai.APIError, match="out of memory"):
        list(stream)


def test_a_dead_engine(client, engine):
    engine.die()
    with pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(model=NAME, messages=HELLO)
    assert caught.value.status_code == 503
