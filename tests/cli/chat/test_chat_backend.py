import json

import httpx
import pytest

from moeflow.cli.chat.chat_backend import AnswerPiece, RemoteChat, full_url
from moeflow.core.errors import EngineError, RequestError
from moeflow.core.sampling_params import SamplingParams

MODELS = {"object": "list", "data": [{"id": "tiny", "object": "model", "max_model_len": 64}]}
SAMPLING = SamplingParams(max_tokens=5, temperature=0.0, stop=("END",))


def sse(*events: object) -> str:
    return "".join(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n" for event in events)


def chunk(text: str | None = None, reason: str | None = None) -> dict[str, object]:
    delta = {} if text is None else {"content": text}
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}


class FakeServer:
    """Answers one chat request with prepared text; keeps the request."""

    def __init__(self, answer: str, status: int = 200) -> None:
        self.answer, self.status = answer, status
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        if request.url.path == "/v1/models":
            return httpx.Response(200, json=MODELS)
        return httpx.Response(self.status, text=self.answer)

    def backend(self, url: str = "http://server:1", api_key: str | None = None) -> RemoteChat:
        return RemoteChat(url, api_key, httpx.MockTransport(self))


def test_an_answer_comes_in_pieces():
    server = FakeServer(sse(chunk(""), chunk("Par"), chunk("is"), chunk(None, "stop"), "[DONE]"))
    backend = server.backend(api_key="k")
    pieces = list(backend.answer([{"role": "user", "content": "capital?"}], SAMPLING))
    assert pieces == [AnswerPiece("", 0), AnswerPiece("Par", 1), AnswerPiece("is", 1), AnswerPiece("", 0, "stop")]
    asked = json.loads(server.requests[1].content)
    assert asked["model"] == "tiny"
    assert asked["stream"] is True
    assert (asked["max_tokens"], asked["temperature"], asked["stop"]) == (5, 0.0, ["END"])
    assert asked["messages"] == [{"role": "user", "content": "capital?"}]
    assert {request.headers["Authorization"] for request in server.requests} == {"Bearer k"}
    backend.close()


def test_an_answer_of_another_server_may_have_any_character_unescaped():
    event = json.dumps(chunk("a\u2028b\x85c"), ensure_ascii=False)
    backend = FakeServer(sse(event, chunk(None, "stop"), "[DONE]")).backend()
    assert "".join(piece.text for piece in backend.answer([], SAMPLING)) == "a\u2028b\x85c"
    backend.close()


def test_what_the_user_left_open_is_the_servers_to_choose():
    server = FakeServer(sse(chunk(None, "stop"), "[DONE]"))
    backend = server.backend()
    list(backend.answer([], SamplingParams(max_tokens=None, top_k=3)))
    asked = json.loads(server.requests[1].content)
    assert asked == {"model": "tiny", "messages": [], "stream": True, "top_k": 3}
    backend.close()


def test_the_models_defaults_are_read_from_the_servers_list(monkeypatch):
    assert FakeServer("").backend().sampling_defaults == {}
    card = MODELS["data"][0] | {"default_sampling_params": {"temperature": 0.25, "top_k": 9}}
    monkeypatch.setitem(MODELS, "data", [card])
    expected = {"temperature": 0.25, "top_k": 9, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert FakeServer("").backend().sampling_defaults == expected


@pytest.mark.parametrize("url", ["http://server:1", "http://server:1/", "http://server:1/v1"])
def test_the_address_may_be_written_as_people_write_it(url):
    server = FakeServer("")
    backend = server.backend(url)
    assert str(server.requests[0].url) == "http://server:1/v1/models"
    assert backend.name == "tiny"
    backend.close()


def test_tokens_are_counted_by_the_server():
    server = FakeServer(json.dumps({"tokens": [1, 2, 3], "count": 3, "max_model_len": 64}))
    backend = server.backend()
    assert (backend.count_tokens("abc"), backend.max_model_len) == (3, 64)
    assert backend.count_tokens([{"role": "user", "content": "abc"}]) == 3
    text, messages = (json.loads(request.content) for request in server.requests[1:])
    assert text == {"model": "tiny", "prompt": "abc", "add_special_tokens": False}
    assert messages == {"model": "tiny", "messages": [{"role": "user", "content": "abc"}]}
    assert {request.url.path for request in server.requests[1:]} == {"/tokenize"}
    backend.close()


def test_another_model_of_the_server_is_used(monkeypatch):
    models = [*MODELS["data"], {"id": "large", "object": "model"}]  # not loaded: its context is not known
    monkeypatch.setitem(MODELS, "data", models)
    server = FakeServer(json.dumps({"tokens": [1], "count": 1, "max_model_len": 128}))
    backend = server.backend()
    assert backend.model_names() == ["tiny", "large"]
    backend.use("large")
    assert (backend.name, backend.max_model_len) == ("large", None)
    assert backend.count_tokens("a") == 1  # which loads it
    assert backend.max_model_len == 128
    assert json.loads(server.requests[-1].content)["model"] == "large"
    with pytest.raises(RequestError, match="no model 'huge'; it has tiny, large"):
        backend.use("huge")
    assert backend.name == "large"
    backend.close()


def test_a_refusal_is_told_in_the_servers_words():
    server = FakeServer(json.dumps({"error": {"message": "the prompt is too long"}}), status=400)
    backend = server.backend()
    with pytest.raises(RequestError, match=r"^the prompt is too long$"):
        list(backend.answer([], SAMPLING))
    backend.close()


def test_a_refusal_by_something_else_is_told_by_its_status():
    backend = FakeServer("<html>", status=502).backend()
    with pytest.raises(RequestError, match="502 Bad Gateway"):
        list(backend.answer([], SAMPLING))
    backend.close()


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (sse(chunk("Par"), {"error": {"message": "the pass failed"}}), "the pass failed"),
        (sse(chunk("Par")), "before it was complete"),
    ],
)
def test_a_broken_answer_is_an_error_not_an_end(answer, complaint):
    backend = FakeServer(answer).backend()
    with pytest.raises(EngineError, match=complaint):
        list(backend.answer([], SAMPLING))
    backend.close()


def test_no_server_says_what_to_do():
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with pytest.raises(
        EngineError, match=r"no server answers at http://server:1: refused. Start one with `moeflow serve`"
    ):
        RemoteChat("http://server:1", None, httpx.MockTransport(refuse))


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("127.0.0.1:8471", "http://127.0.0.1:8471"),
        ("localhost", "http://localhost"),
        ("https://a.example", "https://a.example"),
        ("http://a.example/v1", "http://a.example/v1"),
    ],
)
def test_http_is_assumed_where_no_scheme_is_named(said, meant):
    assert full_url(said) == meant


@pytest.mark.parametrize("url", ["ftp://a.example", "http://a:" + "9" * 5000, "a:b"])
def test_what_is_no_address_is_refused(url):
    with pytest.raises(RequestError, match="write it like http://") as error:
        full_url(url)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    "listing", [b"", b"null", b"[]", b"[" * 5000, b"{}", b'{"data": []}', b'{"data": [7]}', b"\xff"]
)
def test_a_server_that_lists_no_models(listing):
    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=listing))
    with pytest.raises(EngineError, match="Check the address"):
        RemoteChat("http://server:1", None, transport)


@pytest.mark.parametrize(
    "event", ["null", "[]", "7", "{}", "[" * 5000, '{"choices": [7]}', '{"choices": 7}', '{"error": 1}']
)
def test_an_event_that_makes_no_sense(event):
    backend = FakeServer(sse(event)).backend()
    with pytest.raises(EngineError, match="no part of an answer"):
        list(backend.answer([{"role": "user", "content": "x"}], SAMPLING))


def test_a_key_beyond_ascii_is_sent_as_utf8():
    server = FakeServer("")
    server.backend(api_key="\u043a\u043b\u044e\u0447")
    assert (b"authorization", "Bearer \u043a\u043b\u044e\u0447".encode()) in [
        (name.lower(), value) for name, value in server.requests[0].headers.raw
    ]
