"""Every request that cannot be served gets a 4xx with an OpenAI error object that says why."""

from __future__ import annotations

import httpx
import pytest

from moeflow.core.units import MIB
from moeflow.engine.fair_turns import FairTurns
from tests.server.conftest import connect
from tests.server.fake_client import NAME

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]


def error_of(response: httpx.Response, status: int) -> dict:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) - {"n_prompt_tokens", "n_ctx"} == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return body["error"]


@pytest.mark.parametrize(
    ("body", "param", "reason"),
    [
        ({}, "prompt", "Field required"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": []}, "prompt", "none of them empty"),
        ({"prompt": [[]]}, "prompt", "none of them empty"),
        ({"prompt": ["a", ""]}, "prompt", "empty"),
        ({"prompt": ["a", 1]}, "prompt", "must be a string"),
        ({"prompt": [1, "a"]}, "prompt", "must be a string"),
        ({"prompt": [True]}, "prompt", "must be a string"),
        ({"prompt": [1.5]}, "prompt", "must be a string"),
        ({"prompt": [-1]}, "prompt", "must be a string"),
        ({"prompt": [258]}, "prompt", "258"),
        ({"prompt": {}}, "prompt", "must be a string"),
        ({"prompt": "a", "temperature": -0.1}, "temperature", "greater than or equal to 0"),
        ({"prompt": "a", "temperature": "1"}, "temperature", "valid number"),
        ({"prompt": "a", "top_p": 0}, "top_p", "greater than 0"),
        ({"prompt": "a", "n": 0}, "n", "greater than or equal to 1"),
        ({"prompt": "a", "n": True}, "n", "valid integer"),
        ({"prompt": "a", "n": 100}, None, "takes 68"),
        ({"prompt": "a", "max_tokens": 2.5}, "max_tokens", "valid integer"),
        ({"prompt": "a", "max_tokens": 10**400}, "max_tokens", "less than"),
        ({"prompt": "a", "temperature": 10**400}, "temperature", ""),
        ({"prompt": "a", "temperature": 2.1}, "temperature", "less than or equal to 2"),
        ({"prompt": "a", "repetition_penalty": 1e-38}, "repetition_penalty", "greater than or equal to 0.01"),
        ({"prompt": "a", "repetition_penalty": 0.0099}, "repetition_penalty", "greater than or equal to 0.01"),
        ({"prompt": "a", "repetition_penalty": 101}, "repetition_penalty", "less than or equal to 100"),
        ({"prompt": "a", "stop_token_ids": [*range(258)], "min_tokens": 1}, "stop_token_ids", "every token"),
        ({"prompt": "a", "stop": "x" * 1025}, "stop", "1024 characters"),
        ({"prompt": "a", "logit_bias": {"05": 1}}, "logit_bias.05.[key]", "pattern"),
        ({"prompt": "a", "logprobs": 21}, "logprobs", "20"),
        ({"prompt": "a", "logprobs": True}, "logprobs", "valid integer"),
        ({"prompt": "a", "stop": ["a", ""]}, "stop", "none of them empty"),
        ({"prompt": "a", "stop": ["x"] * 17}, "stop", "at most 16"),
        ({"prompt": "a", "stop_token_ids": [999]}, "stop_token_ids", "999"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, None, "pattern"),
        ({"prompt": "a", "logit_bias": {"999": 1}}, "logit_bias", "999"),
        ({"prompt": "a", "logit_bias": {"5": 101}}, "logit_bias.5", "100"),
        ({"prompt": "a", "best_of": True}, "best_of", "must be 1"),
        ({"prompt": "a", "best_of": 2}, "best_of", "must be 1"),
        ({"prompt": "a", "suffix": "x"}, "suffix", "not supported"),
        ({"prompt": "a", "stream_options": {}}, "stream_options", "stream: true"),
        ({"prompt": "a", "stream": True, "stream_options": {"usage": True}}, "stream_options.usage", "include_usage"),
        ({"prompt": "a", "temprature": 1}, "temprature", "did you mean 'temperature'?"),
        ({"prompt": "a", "xyzzy": 1}, "xyzzy", "unknown field"),
        ({"prompt": "a", "foo": 1}, "foo", "unknown field 'foo': leave it out"),
        ({"prompt": "a", "system": "x"}, "system", "unknown field 'system': leave it out"),
        ({"prompt": "a", "template": "x"}, "template", "unknown field 'template': leave it out"),
        ({"prompt": "a", "max_length": 1}, "max_length", "did you mean 'max_tokens'?"),
        ({"prompt": "a", "temp": 1}, "temp", "did you mean 'temperature'?"),
        ({"prompt": "a", "stream": True, "echo": True, "logprobs": 1, "n": 2}, "n", "one completion"),
    ],
)
async def test_a_completion_that_makes_no_sense(http, engine, body, param, reason):
    error = error_of(await http.post("/v1/completions", json=body), 400)
    assert param is None or error["param"] == param
    assert reason in error["message"]
    assert error["type"] == "invalid_request_error"
    assert not engine.submissions


@pytest.mark.parametrize(
    "body", [{"async_": None}, {"xyzzy": None, "suffix": None}, {"stream_options": None, "x": None}]
)
async def test_null_asks_for_nothing_whatever_the_field(http, body):
    """A client's `model_dump()` sends null for each field that it knows and the user left unset."""
    assert (await http.post("/v1/completions", json={"prompt": "a", **body})).status_code == 200


async def test_null_asks_for_nothing_in_inner_objects_either(http):
    message = {"role": "user", "content": [{"type": "text", "text": "Hi", "new_field": None}], "other": None}
    assert (await http.post("/v1/chat/completions", json={"messages": [message]})).status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "Hello"}, "messages"),
        ({"messages": HELLO, "top_logprobs": 2}, "top_logprobs"),
        ({"messages": HELLO, "logprobs": 1}, "logprobs"),
        ({"messages": HELLO, "prompt": "x"}, "prompt"),
    ],
)
async def test_a_chat_that_makes_no_sense(http, body, param):
    assert error_of(await http.post(CHAT, json=body), 400)["param"] == param


@pytest.mark.parametrize("body", ["[]", "3", '"x"', "null", "true"])
async def test_a_body_that_is_no_object(http, body):
    response = await http.post(CHAT, content=body, headers={"content-type": "application/json"})
    error_of(response, 400)


@pytest.mark.parametrize("body", [b"", b"{", b'{"a": NaN}', b"\xff", b"[" * 50_000, b'{"prompt": "\\ud800"}'])
async def test_a_body_that_is_no_json(http, body):
    response = await http.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert error_of(response, 400)["code"] == "invalid_json"


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", "json"])
async def test_other_content_types(http, kind):
    response = await http.post(CHAT, content=b'{"messages": []}', headers={"content-type": kind})
    assert error_of(response, 415)["code"] == "unsupported_media_type"


async def test_a_charset_with_the_content_type_is_fine(http):
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    response = await http.post(CHAT, content=b'{"messages": [{"role": "user", "content": "x"}]}', headers=headers)
    assert response.status_code == 200


async def test_a_body_beyond_the_limit(make_app):
    async with connect(make_app(max_body_bytes=2000)) as http:
        body = b'{"prompt": "%s"}' % (b"x" * 2000)
        headers = {"content-type": "application/json"}
        assert (
            error_of(await http.post("/v1/completions", content=body, headers=headers), 413)["code"] == "body_too_large"
        )

        async def chunks():
            for start in range(0, len(body), 100):
                yield body[start : start + 100]

        assert error_of(await http.post("/v1/completions", content=chunks(), headers=headers), 413)

        async def endless():
            for _ in range(10 * MIB):
                yield b" " * 1000

        assert error_of(await http.post("/v1/completions", content=endless(), headers=headers), 413)


@pytest.mark.parametrize("endpoint", ["/v1/completions", CHAT, "/tokenize", "/detokenize"])
async def test_another_models_name(http, endpoint):
    body = {"prompt": "x"} if endpoint != CHAT else {"messages": HELLO}
    body = {"tokens": [1]} if endpoint == "/detokenize" else body
    error = error_of(await http.post(endpoint, json={"model": "gpt-4o", **body}), 404)
    assert error["code"] == "model_not_found"
    assert NAME in error["message"]
    assert (await http.post(endpoint, json={"model": NAME, **body})).status_code == 200


@pytest.mark.parametrize("prompt", ["x" * 256, ["x", "x" * 300], [5] * 256])
async def test_a_prompt_longer_than_the_context(http, engine, prompt):
    error = error_of(await http.post("/v1/completions", json={"prompt": prompt}), 400)
    assert error["code"] == "context_length_exceeded"
    assert "256 tokens" in error["message"]
    assert not engine.submissions


@pytest.mark.parametrize("more", [{}, {"max_tokens": 17}, {"max_tokens": 2**31, "min_tokens": 2**31}])
async def test_an_answer_ends_with_the_context(http, more):
    body = {"prompt": ["x" * 246, "x"], "ignore_eos": True, **more}
    response = await http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    long, _ = response.json()["choices"]
    assert (len(long["text"].encode()), long["finish_reason"]) == (10, "length")


async def test_paths_and_methods_that_do_not_exist(http):
    assert error_of(await http.get("/v1/nothing"), 404)["code"] == "not_found"
    assert error_of(await http.post("/v1/nothing", json={}), 404)["code"] == "not_found"
    assert error_of(await http.get(CHAT), 405)["code"] == "method_not_allowed"
    assert error_of(await http.post("/v1/models", json={}), 405)["code"] == "method_not_allowed"
    assert error_of(await http.get("/docs"), 404)


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/v1/files", "GET, POST"),
        ("/v1/batches", "GET, POST"),
        ("/v1/files/file-x", "GET, DELETE"),
        ("/v1/models/x", "GET"),
        ("/v1/responses/resp_x", "GET, DELETE"),
        ("/v1/responses/input_tokens", "POST"),
        ("/health", "GET, HEAD"),
        ("/", "GET, HEAD"),
        (CHAT, "POST"),
    ],
)
@pytest.mark.parametrize("method", ["OPTIONS", "PATCH", "BREW"])
async def test_a_method_that_is_not_allowed_names_all_that_are(http, method, path, methods):
    response = await http.request(method, path)
    assert error_of(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == methods


async def test_a_fault_of_ours_tells_nothing_of_its_inside(http, app, monkeypatch):
    def fail(*args, **fields):
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(app.state.service, "require_model", fail)
    error = error_of(await http.post(CHAT, json={"messages": HELLO}), 500)
    assert error["type"] == "server_error"
    assert "secret" not in error["message"]


async def test_a_refused_request_leaves_the_queue(http, app):
    for body in ({"prompt": "x" * 999}, {"prompt": "", "n": 3}, {"prompt": [999]}):
        error_of(await http.post("/v1/completions", json=body), 400)
    assert app.state.service.models.num_unfinished == 0


@pytest.mark.parametrize("tools", [{}, {"tools": [{"type": "function", "function": {"name": "f"}}]}])
async def test_a_client_with_too_many_grammars_comes_back_later(http, app, monkeypatch, tools):
    full = FairTurns(1, max_waiting=0)
    monkeypatch.setattr(app.state.service.models.find(NAME).loaded, "_check_turns", full)
    form = {"guided_regex": "a", **tools}
    async with full.turn("127.0.0.1", "another"):
        for path, asked in ((CHAT, {"messages": HELLO}), ("/v1/completions", {"prompt": "a"})):
            response = await http.post(path, json={**asked, **(form if path == CHAT else {"guided_regex": "a"})})
            assert error_of(response, 429)["code"] == "queue_full"
            assert int(response.headers["Retry-After"]) > 0
