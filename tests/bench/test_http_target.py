"""A server as the target: requests sent, answers parsed, answers refused. The server is a function."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from moeflow.bench.http_target import HttpTarget, ReportedModel, check_address
from moeflow.bench.replay import replay
from moeflow.core.errors import ConfigError, EngineError, MoeflowError, RequestError
from moeflow.workload.poisson import Arrival

MODELS = {"data": [{"id": "mine", "max_model_len": 64}]}
STATS = {"model": {"vocab_size": 258, "max_model_len": 128, "weight_format": "float32"}}


def events(*payloads, done: bool = True) -> str:
    lines = [f"data: {json.dumps(payload)}\n\n" for payload in payloads]
    return "".join([*lines, "data: [DONE]\n\n" if done else ""])


def chunk(text: str = "a") -> dict:
    return {"choices": [{"index": 0, "text": text}], "usage": None}


def usage(completion_tokens: int) -> dict:
    return {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": completion_tokens, "total_tokens": 9}}


def run(handler, body):
    async def with_target():
        async with HttpTarget("http://127.0.0.1:1", transport=httpx.MockTransport(handler), api_key="k") as target:
            return await body(target)

    return asyncio.run(with_target())


def serve(answer: str, status: int = 200, seen: list | None = None):
    def handler(request: httpx.Request) -> httpx.Response:
        if seen is not None:
            seen.append(request)
        if request.url.path == "/v1/models":
            return httpx.Response(200, json=MODELS)
        if request.url.path == "/stats":
            return httpx.Response(200, json=STATS)
        return httpx.Response(status, text=answer)

    return handler


def ask(answer: str, num_new: int, status: int = 200, seen: list | None = None):
    async def body(target):
        await target.model()
        return (await replay(target, [Arrival(0.0, [5, 6], num_new)], lambda: None))[0]

    return run(serve(answer, status, seen), body)


def test_a_server_may_send_any_character_unescaped():
    assert ask(events(chunk(), usage(1)).replace('"a"', '"\u2028\x85"'), 1).error is None


def test_a_request_is_exact_and_names_model_and_key():
    seen: list[httpx.Request] = []
    served = ask(events(chunk(), chunk(), usage(2)), 2, seen=seen)
    assert (served.num_new, served.error) == (2, None)
    assert served.first_s is not None
    body = json.loads(seen[-1].content)
    assert body["prompt"] == [5, 6]
    assert (body["model"], body["max_tokens"], body["ignore_eos"], body["stream"]) == ("mine", 2, True, True)
    assert seen[-1].headers["authorization"] == "Bearer k"


def test_tokens_are_the_servers_count_not_the_events():
    assert ask(events(chunk("ab"), usage(5)), 5).error is None
    assert ask(events(chunk(), chunk(), chunk()), 3).error is None  # a server that does not count
    assert ask(events(chunk(), usage(4)), 5).error == "asked for 5 tokens, got 4"


@pytest.mark.parametrize(
    ("answer", "status", "complaint"),
    [
        (json.dumps({"error": {"message": "queue full"}}), 429, "429: queue full"),
        ("oops", 500, "the server answered 500"),
        (events({"error": {"message": "the engine died"}}, done=False), 200, "the engine died"),
        (events(chunk(), done=False), 200, "ended the answer before it was complete"),
        ("data: {nonsense\n\n", 200, "no event"),
    ],
)
def test_failures_are_told(answer, status, complaint):
    assert complaint in (ask(answer, 2, status).error or "")


def test_a_broken_connection_is_told():
    def handler(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadError("gone")

    async def body(target):
        return (await replay(target, [Arrival(0.0, [5], 1)], lambda: None))[0]

    assert "ReadError gone" in (run(handler, body).error or "")


def test_what_is_served():
    async def body(target):
        return await target.model()

    assert run(serve(""), body) == ReportedModel("mine", 258, 128)

    def stranger(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json=MODELS) if request.url.path == "/v1/models" else httpx.Response(404)

    assert run(stranger, body) == ReportedModel("mine", None, 64)


def test_a_server_that_still_loads_does_not_tell():
    async def body(target):
        return await target.model()

    def loading(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json=MODELS if request.url.path == "/v1/models" else {"model": None})

    assert run(loading, body) == ReportedModel("mine", None, 64)


def test_no_server_and_a_refusal_are_errors():
    async def body(target):
        return await target.model()

    def nobody(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with pytest.raises(EngineError, match="no server answers at http"):
        run(nobody, body)
    with pytest.raises(RequestError, match="401: no key"):
        run(lambda request: httpx.Response(401, json={"error": {"message": "no key"}}), body)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:8000", "http://localhost:1/v1/", "http://[::1]:2", "https://127.9.9.9"]
)
def test_this_machine_is_always_allowed(url):
    assert check_address(url, allow_remote=False) == url.rstrip("/").removesuffix("/v1")


@pytest.mark.parametrize(
    "url", ["http://example.com", "http://10.0.0.1:80", "http://127.0.0.1.example.com", "http://0.0.0.0"]
)
def test_other_machines_need_to_be_insisted_on(url):
    with pytest.raises(ConfigError, match="--allow-remote"):
        check_address(url, allow_remote=False)
    assert check_address(url, allow_remote=True) == url


@pytest.mark.parametrize("url", ["ftp://127.0.0.1", "http://", "http://[::1"])
def test_no_address_is_an_error(url):
    with pytest.raises(MoeflowError, match="address"):
        check_address(url, allow_remote=True)


def test_http_is_assumed_where_no_scheme_is_named():
    assert check_address("127.0.0.1:8000/v1", allow_remote=False) == "http://127.0.0.1:8000"
    with pytest.raises(ConfigError, match="--allow-remote"):
        check_address("a.example:8000", allow_remote=False)
