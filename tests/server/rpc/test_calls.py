"""Calls over gRPC: answers, streams, cancelled calls, refusals, keys, health, TLS."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from types import SimpleNamespace
from unittest.mock import AsyncMock

import grpc
import pytest
from google.protobuf.struct_pb2 import Value
from grpc_health.v1 import health_pb2, health_pb2_grpc

from moeflow.core.errors import ConfigError
from moeflow.engine.client import EngineState
from moeflow.server import launch
from moeflow.server.errors import ApiError
from moeflow.server.http_server import HttpServer
from moeflow.server.listener import listen
from moeflow.server.rpc import health, rpc_server
from moeflow.server.rpc.exchange import abort, status_code
from moeflow.server.rpc.messages import request_body
from moeflow.server.rpc.rpc_server import SERVICE, RpcServer
from tests.server.conftest import connect
from tests.server.fake_client import REPLY
from tests.server.proxies import TLS
from tests.server.rpc.calling import Caller, calling
from tests.server.rpc.test_messages import message

pytestmark = pytest.mark.anyio

HELLO = message("ChatRequest", messages=[message("ChatMessage", role="user", content="Hi")])
ABC = message("CompletionRequest", prompt=["abc"], max_tokens=50)
CODE = grpc.StatusCode


@pytest.fixture
async def rpc(app):
    async with calling(app) as caller:
        yield caller


def has_ipv6() -> bool:
    """Whether this machine has the loopback address of IPv6."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.002)


def ends(caplog) -> list[str]:
    """Return how requests ended, by the server's log."""
    return [it.fields["end"] for it in caplog.records if it.name == "moeflow.server.request_log"]


async def refusal(call) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await (all_of(call) if hasattr(call, "read") else call)
    return error.value


async def all_of(call):
    return [message async for message in call]


async def test_whole_answers(rpc, app):
    answer = await rpc.Chat(HELLO)
    assert answer.choices[0].message.content == REPLY
    assert answer.choices[0].finish_reason == "stop"
    async with connect(app) as http:
        body = {"prompt": "abc", "logprobs": 2, "echo": True, "max_tokens": 3, "timings_per_token": True}
        plain = (await http.post("/v1/completions", json=body)).json()
    request = message("CompletionRequest", **body | {"prompt": ["abc"]})
    answer = await rpc.Complete(request)
    (choice,), (expected,) = answer.choices, plain["choices"]
    assert choice.text == expected["text"]
    assert list(choice.logprobs.token_logprobs) == expected["logprobs"]["token_logprobs"]
    assert [dict(top) if top else None for top in choice.logprobs.top_logprobs] == expected["logprobs"]["top_logprobs"]
    assert answer.usage.total_tokens == plain["usage"]["total_tokens"]
    assert answer.timings["predicted_n"] == 3


async def test_a_stream_brings_chunks_as_they_come(rpc, engine):
    engine.pause_after = 3
    request = message("ChatRequest", n=2, stream_options=message("StreamOptions", include_usage=True))
    request.MergeFrom(HELLO)
    texts, usage = ["", ""], None
    call = rpc.StreamChat(request, metadata=[("x-request-id", "mine")])
    assert ("x-request-id", "mine") in list(await call.initial_metadata())
    async for chunk in call:
        engine.pause_after = None  # had the chunks come at the end, it would pause for ever
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content
        usage = chunk.usage if chunk.HasField("usage") else usage
    assert texts == [REPLY, REPLY]
    assert usage.completion_tokens == 2 * len(engine.reply)


@pytest.mark.parametrize("name", ["Complete", "StreamComplete"])
async def test_a_call_that_is_cancelled_or_too_late_ends_in_the_engine(rpc, engine, name, caplog):
    engine.pause_after = 2
    with caplog.at_level(logging.DEBUG):
        call = getattr(rpc, name)(ABC)
        waiting = asyncio.ensure_future(refusal(call))
        await until(lambda: engine.live)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await until(lambda: len(engine.cancelled) == 1)
        assert (await refusal(getattr(rpc, name)(ABC, timeout=0.2))).code() is CODE.DEADLINE_EXCEEDED
        await until(lambda: len(engine.cancelled) == 2)
        await until(lambda: len(ends(caplog)) == 2)
    assert ends(caplog) == ["disconnected"] * 2
    assert [it.getMessage() for it in caplog.records if it.levelno >= logging.ERROR] == []
    engine.pause_after = None
    assert (await rpc.Complete(ABC)).choices[0].text == REPLY


async def test_a_client_that_leaves_in_the_middle_of_a_stream_is_no_error(rpc, engine, caplog):
    with caplog.at_level(logging.INFO):
        call = rpc.StreamComplete(message("CompletionRequest", prompt=["abc"], max_tokens=200, ignore_eos=True))
        await call.read()
        call.cancel()
        await until(lambda: ends(caplog))
    assert ends(caplog) == ["disconnected"]
    assert len(engine.cancelled) == 1
    assert [it.getMessage() for it in caplog.records if it.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("stream", ["", "Stream"])
async def test_refusals_have_the_codes_of_grpc_and_the_words_of_http(make_app, engine, stream):
    async with calling(make_app(max_queue=0, max_body_bytes=2000)) as rpc:
        complete, chat = getattr(rpc, f"{stream}Complete"), getattr(rpc, f"{stream}Chat")
        bad = await refusal(complete(message("CompletionRequest", prompt=["a"], temperature=9)))
        assert bad.code() is CODE.INVALID_ARGUMENT
        assert "temperature" in bad.details()
        assert dict(bad.trailing_metadata())["error-param"] == "temperature"
        mixed = message("CompletionRequest", prompt=["a"], prompt_token_ids=[message("TokenIds", ids=[1])])
        assert (await refusal(complete(mixed))).code() is CODE.INVALID_ARGUMENT
        infinite = message("CompletionRequest", prompt=["a"], temperature=float("inf"))
        assert (await refusal(complete(infinite))).code() is CODE.INVALID_ARGUMENT
        no_json = message("CompletionRequest", prompt=["a"], response_format=Value(number_value=float("nan")))
        assert (await refusal(complete(no_json))).code() is CODE.INVALID_ARGUMENT
        assert (await refusal(chat(message("ChatRequest")))).code() is CODE.INVALID_ARGUMENT
        unknown = await refusal(complete(message("CompletionRequest", prompt=["a"], model="other")))
        assert unknown.code() is CODE.NOT_FOUND
        many = await refusal(complete(message("CompletionRequest", prompt=["a"], n=100)))
        assert many.code() is CODE.INVALID_ARGUMENT
        large = await refusal(complete(message("CompletionRequest", prompt=["a" * 3000])))
        assert large.code() is CODE.RESOURCE_EXHAUSTED
        engine.pause_after = 1
        busy = [rpc.Complete(ABC) for _ in range(4)]
        waiting = [asyncio.ensure_future(call) for call in busy]
        await until(lambda: len(engine.live) == 4)
        full = await refusal(complete(ABC))
        assert (full.code(), dict(full.trailing_metadata())["error-code"]) == (CODE.RESOURCE_EXHAUSTED, "queue_full")
        assert int(dict(full.initial_metadata())["retry-after"]) >= 1
        engine.pause_after = None
        await asyncio.gather(*waiting)


async def test_the_log_has_the_clients_address_also_by_ipv6(make_app, caplog):
    for host in ("127.0.0.1", *["::1"] * has_ipv6()):
        async with calling(make_app(host=host)) as rpc:
            with caplog.at_level(logging.INFO, "moeflow"):
                await rpc.Complete(ABC)
        (line,) = [it.fields for it in caplog.records if it.name == "moeflow.server.request_log"]
        assert (line["client"], line["path"], line["status"]) == (host, "/v1/completions", 200)
        caplog.clear()


async def test_more_calls_than_the_server_holds_are_refused(app, engine):
    engine.pause_after = 1
    async with calling(app, max_calls=1) as rpc:
        first = asyncio.ensure_future(rpc.Complete(ABC))
        await until(lambda: engine.live)
        assert (await refusal(rpc.Complete(ABC))).code() is CODE.RESOURCE_EXHAUSTED
        engine.pause_after = None
        await first


async def test_failures_of_the_engine_and_the_shutdown(rpc, engine, app):
    engine.fail_after = 2
    for call in (rpc.Complete(ABC), rpc.StreamComplete(ABC)):
        failed = await refusal(call)
        assert (failed.code(), failed.details()) == (CODE.INTERNAL, "out of memory")
    engine.fail_after, engine.cancel_all = None, True
    assert (await refusal(rpc.StreamComplete(ABC))).code() is CODE.UNAVAILABLE
    app.state.service.drain()
    drained = await refusal(rpc.Complete(ABC))
    assert (drained.code(), dict(drained.trailing_metadata())["error-code"]) == (CODE.UNAVAILABLE, "shutting_down")


async def test_an_error_in_the_server_is_internal_and_is_logged(rpc, app, monkeypatch, caplog):
    async def broken(*args, **kwargs):
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(app.state.service, "require_model", broken)
    for call in (rpc.Complete, rpc.StreamComplete):
        failed = await refusal(call(ABC))
        assert failed.code() is CODE.INTERNAL
        assert "secret" not in failed.details()
        await until(lambda: "ZeroDivisionError: secret" in caplog.text)
        caplog.clear()


def test_statuses():
    expected = {400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND"}
    expected |= {
        413: "RESOURCE_EXHAUSTED",
        429: "RESOURCE_EXHAUSTED",
        499: "CANCELLED",
        500: "INTERNAL",
        503: "UNAVAILABLE",
    }
    assert {status: status_code(ApiError(status, "c", "m").status_code).name for status in expected} == expected


async def test_keys_and_their_limits_are_those_of_http(make_app, tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text("[alice]\nkey = 'a-key'\nrequests-per-minute = 1\n")
    async with calling(make_app(api_keys_file=keys)) as rpc:
        for metadata in ((), (("authorization", "Bearer other"),)):
            for call in (rpc.Chat(HELLO, metadata=metadata), rpc.StreamChat(HELLO, metadata=metadata)):
                assert (await refusal(call)).code() is CODE.UNAUTHENTICATED
        alice = (("authorization", "Bearer a-key"),)
        assert (await rpc.Chat(HELLO, metadata=alice)).choices[0].message.content == REPLY
        again = await refusal(rpc.Chat(HELLO, metadata=alice))
        assert (again.code(), dict(again.trailing_metadata())["error-code"]) == (
            CODE.RESOURCE_EXHAUSTED,
            "rate_limit_exceeded",
        )
        await health_pb2_grpc.HealthStub(rpc.channel).Check(health_pb2.HealthCheckRequest())


async def test_messages_without_a_key_are_not_read(make_app, monkeypatch):
    monkeypatch.setattr(rpc_server, "request_body", None)
    async with calling(make_app(api_key="a-key")) as rpc:
        for stream in ("", "Stream"):
            path = f"/{SERVICE.full_name}/{stream}Complete"
            call = (rpc.channel.stream_stream if stream else rpc.channel.stream_unary)(path)
            assert (await refusal(call())).code() is CODE.UNAUTHENTICATED  # although it never sends a message


async def test_a_large_message_counts_in_the_memory_of_bodies_until_it_is_read(app, rpc, monkeypatch):
    bodies, held = app.state.service.large_bodies, []

    def noting(*args, **kwargs):
        held.append(bodies._num_bytes)
        held.append(threading.current_thread() is threading.main_thread())
        return request_body(*args, **kwargs)

    monkeypatch.setattr(rpc_server, "request_body", noting)
    large = message("CompletionRequest", prompt=["a" * 5000])
    await refusal(rpc.Complete(large))
    assert held == [large.ByteSize(), False]
    assert bodies._num_bytes == 0
    bodies._limit = large.ByteSize() - 1
    full = await refusal(rpc.Complete(large))
    assert (full.code(), dict(full.trailing_metadata())["error-code"]) == (CODE.RESOURCE_EXHAUSTED, "queue_full")
    assert (await rpc.Complete(ABC)).choices[0].text == REPLY


async def test_a_call_without_its_message_ends(rpc, caplog):
    call = rpc.channel.stream_unary(f"/{SERVICE.full_name}/Complete")
    assert (await refusal(call(iter(())))).code() is CODE.INVALID_ARGUMENT
    with caplog.at_level(logging.INFO):
        assert (await refusal(call(timeout=0.05))).code() is CODE.DEADLINE_EXCEEDED
        await until(lambda: ends(caplog))
    assert [it.getMessage() for it in caplog.records if it.levelno >= logging.ERROR] == []


async def test_health_follows_the_server(rpc, app, engine, monkeypatch):
    monkeypatch.setattr(health, "WATCH_S", 0.01)
    stub, status = health_pb2_grpc.HealthStub(rpc.channel), health_pb2.HealthCheckResponse
    for name in ("", SERVICE.full_name, "grpc.health.v1.Health"):
        assert (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status == status.SERVING
    assert (await refusal(stub.Check(health_pb2.HealthCheckRequest(service="no")))).code() is CODE.NOT_FOUND
    assert len((await stub.List(health_pb2.HealthListRequest())).statuses) == 3
    watch = stub.Watch(health_pb2.HealthCheckRequest())
    assert (await watch.read()).status == status.SERVING
    engine.state = EngineState.STALLED
    assert (await watch.read()).status == status.NOT_SERVING
    engine.state = EngineState.READY
    assert (await watch.read()).status == status.SERVING
    app.state.service.drain()
    assert (await watch.read()).status == status.NOT_SERVING
    assert await watch.read() is grpc.aio.EOF


async def test_the_end_of_the_server_reaches_watching_clients(make_app):
    app = make_app(port=0, grpc_port=0)
    listener = listen(app.state.service.config)
    async with launch._answering(HttpServer(app), None, listener, asyncio.Queue()) as rpc:
        channel = grpc.aio.insecure_channel(rpc.address)
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        await watch.read()
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert await watch.read() is grpc.aio.EOF
    await channel.close()


async def test_watching_takes_few_places_of_calls(rpc, monkeypatch):
    monkeypatch.setattr(health, "MAX_WATCHES", 1)
    stub = health_pb2_grpc.HealthStub(rpc.channel)
    watch = stub.Watch(health_pb2.HealthCheckRequest())
    await watch.read()
    second = stub.Watch(health_pb2.HealthCheckRequest())
    assert (await refusal(second)).code() is CODE.RESOURCE_EXHAUSTED
    watch.cancel()

    async def is_free() -> bool:
        return await stub.Watch(health_pb2.HealthCheckRequest()).read() is not grpc.aio.EOF

    async with asyncio.timeout(10):
        while not await is_free():
            await asyncio.sleep(0.01)


async def test_more_connections_than_the_server_holds_are_closed(app):
    async with calling(app, max_calls=1) as rpc:
        assert (await rpc.Complete(ABC)).choices[0].text == REPLY
        reader, writer = await asyncio.open_connection(*rpc.address.split(":"))
        async with asyncio.timeout(10):
            assert await reader.read() == b""
        writer.close()


@pytest.mark.skipif(not has_ipv6(), reason="needs IPv6")
async def test_the_wildcard_of_ipv4_is_no_address_of_ipv6(make_app):
    async with calling(make_app(host="0.0.0.0")) as rpc:
        assert (await rpc.Complete(ABC)).choices[0].text == REPLY
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("::1", int(rpc.address.rpartition(":")[2])))


async def test_a_parameter_with_control_characters_is_left_out():
    aborted = AsyncMock()
    await abort(SimpleNamespace(abort=aborted), ApiError(400, "code", "m", param="a\nb"))
    aborted.assert_awaited_once_with(CODE.INVALID_ARGUMENT, "m", (("error-code", "code"),))


async def test_tls_and_a_certificate_that_is_renewed(make_app, tmp_path):
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"

    def install(name):
        cert.write_bytes((TLS / f"{name}.pem").read_bytes())
        key.write_bytes((TLS / f"{name}.key").read_bytes())

    async def ask(address, name):
        credentials = grpc.ssl_channel_credentials((TLS / f"{name}.pem").read_bytes())
        async with grpc.aio.secure_channel(address, credentials) as channel:
            return (await Caller(channel).Complete(ABC, timeout=5)).choices[0].text

    install("first")
    server = RpcServer(make_app(tls_cert=cert, tls_key=key), 0, 100)
    await server.start()
    try:
        assert await ask(server.address, "first") == REPLY
        async with grpc.aio.insecure_channel(server.address) as channel:
            assert (await refusal(Caller(channel).Complete(ABC, timeout=5))).code() is CODE.UNAVAILABLE
        install("second")
        server.reload()
        assert await ask(server.address, "second") == REPLY
        with pytest.raises(grpc.aio.AioRpcError):
            await ask(server.address, "first")
    finally:
        await server.stop(0)


async def test_a_port_in_use_is_an_error_with_a_remedy(app):
    first = RpcServer(app, 0, 100)
    await first.start()
    try:
        port = int(first.address.rpartition(":")[2])
        with pytest.raises(ConfigError, match=f"port {port}: the port is in use.*--grpc-port"):
            await RpcServer(app, port, 100).start()
    finally:
        await first.stop(0)
