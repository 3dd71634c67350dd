"""Traces of requests, as a collector on loopback gets them: names, times, numbers, whose trace, and never a prompt."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from moeflow.core.errors import ConfigError
from moeflow.engine.generator import Generator
from moeflow.server import tracing, tracing_choice
from moeflow.server.app import create_app
from moeflow.server.config import ServerConfig
from moeflow.server.tracing import RequestTracer
from moeflow.server.tracing_choice import is_tracing_wanted
from tests.packed import pack_beside
from tests.server.conftest import connect
from tests.server.fake_client import NAME
from tests.server.observed.test_request_log import CHAT, SECRET, lines
from tests.server.server_process import Server
from tests.tiny_mixtral import write_tiny_mixtral

__all__ = ["lines"]  # a fixture

VARIABLES = (
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_SDK_DISABLED",
    "OTEL_TRACES_EXPORTER",
)
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector(ThreadingHTTPServer):
    """Keeps the bodies and paths of its requests."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.paths, self.bodies = [], []

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def resources(self):
        found = []
        for body in self.bodies:
            message = ExportTraceServiceRequest()
            message.ParseFromString(body)
            found += message.resource_spans
        return found

    def spans(self) -> dict[str, Span]:
        every = [span for resource in self.resources() for scope in resource.scope_spans for span in scope.spans]
        assert len({span.name for span in every}) == len(every)
        return {span.name: span for span in every}


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        self.server.paths.append(self.path)
        self.server.bodies.append(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *args):
        pass


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def collector():
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def tracer(collector):
    tracer = RequestTracer(collector.url + "/")
    yield tracer
    tracer.close()


@pytest.fixture
def http(engine, tokenizer, tracer):
    return connect(create_app(Generator(engine, tokenizer), ServerConfig(), tracer.trace))


def values(attributes) -> dict[str, object]:
    found = {}
    for pair in attributes:
        kind = pair.value.WhichOneof("value")
        value = getattr(pair.value, kind)
        found[pair.key] = [it.string_value for it in value.values] if kind == "array_value" else value
    return found


@pytest.mark.anyio
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_a_span_with_what_the_engine_did_within(http, engine, tracer, collector, lines, stream):
    engine.num_cached_tokens = 3
    before_ns = time.time_ns()
    async with http:
        response = await http.post("/v1/chat/completions", json={**CHAT, "stream": stream, "max_tokens": 5})
        await http.get("/health")
    tracer.close()
    after_ns = time.time_ns()
    spans = collector.spans()
    assert collector.paths == ["/v1/traces"]
    assert set(spans) == {f"chat {NAME}", "queue", "prefill", "decode"}
    span = spans[f"chat {NAME}"]
    assert values(span.attributes) == {
        "http.request.method": "POST",
        "url.path": "/v1/chat/completions",
        "http.response.status_code": 200,
        "client.address": "127.0.0.1",
        "moeflow.request.id": response.headers["x-request-id"],
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "moeflow",
        "gen_ai.request.model": NAME,
        "gen_ai.response.model": NAME,
        "gen_ai.usage.input_tokens": len(engine.submissions[0].prompt_token_ids),
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 3,
        "gen_ai.response.finish_reasons": ["length"],
    }
    assert span.kind == Span.SPAN_KIND_SERVER
    assert span.status.code == Status.STATUS_CODE_UNSET
    assert span.parent_span_id == b""
    ordered = [spans[name] for name in ("queue", "prefill", "decode")]
    assert {(it.trace_id, it.parent_span_id) for it in ordered} == {(span.trace_id, span.span_id)}
    times = [
        span.start_time_unix_nano,
        *(at for it in ordered for at in (it.start_time_unix_nano, it.end_time_unix_nano)),
    ]
    times.append(span.end_time_unix_nano)
    assert times == sorted(times)
    assert before_ns - 10**6 <= times[0]
    assert times[-1] <= after_ns + 10**6
    assert next(line for line in lines.requests() if "trace_id" in line)["trace_id"] == span.trace_id.hex()
    assert SECRET.encode() not in b"".join(collector.bodies)


@pytest.mark.anyio
async def test_the_clients_trace_goes_on(http, tracer, collector, lines):
    async with http:
        await http.post("/v1/chat/completions", json=CHAT, headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
    tracer.close()
    span = collector.spans()[f"chat {NAME}"]
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert lines.one()["trace_id"] == TRACE


@pytest.mark.anyio
async def test_a_trace_that_the_client_leaves_out_is_not_sent(http, tracer, collector):
    async with http:
        await http.post("/v1/chat/completions", json=CHAT, headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
    tracer.close()
    assert collector.bodies == []


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (f"00-{TRACE}-{PARENT}-01", TRACE),
        (f"00-{TRACE}-{PARENT}-01\n", None),
        (f"00-{'0' * 32}-{PARENT}-01", None),
        (f"ff-{TRACE}-{PARENT}-01", None),
        (f"00-{TRACE.upper()}-{PARENT}-01", None),
        ("xyzzy", None),
    ],
)
async def test_without_tracing_the_log_has_the_clients_trace(make_app, lines, header, expected):
    async with connect(make_app()) as http:
        await http.post("/v1/chat/completions", json=CHAT, headers={"traceparent": header.encode()})
    assert lines.one().get("trace_id") == expected


@pytest.mark.anyio
async def test_refused_and_failed_requests_say_so(http, engine, tracer, collector):
    engine.fail_after = 2
    async with http:
        await http.post("/v1/completions", json={"prompt": SECRET, "top_p": 7})
        await http.post("/v1/chat/completions", json=CHAT)
    tracer.close()
    spans = collector.spans()
    refused, failed = spans["POST /v1/completions"], spans[f"chat {NAME}"]
    assert values(refused.attributes)["error.type"] == "invalid_value"
    assert refused.status.code == Status.STATUS_CODE_UNSET  # the client's mistake: no error of the server
    assert values(failed.attributes)["error.type"] == "generation_failed"
    assert values(failed.attributes)["http.response.status_code"] == 500
    assert failed.status.code == Status.STATUS_CODE_ERROR
    assert SECRET.encode() not in b"".join(collector.bodies)


@pytest.mark.anyio
async def test_a_collector_that_is_away_holds_up_nothing(engine, tokenizer):
    tracer = RequestTracer("http://127.0.0.1:9")
    async with connect(create_app(Generator(engine, tokenizer), ServerConfig(), tracer.trace)) as http:
        begun_s = time.monotonic()
        assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200
        assert time.monotonic() - begun_s < 5
    tracer.close()


def test_the_resource_is_named_as_the_environment_says(collector, monkeypatch):
    for name, expected in ((None, "moeflow"), ("shop", "shop")):
        if name:
            monkeypatch.setenv("OTEL_SERVICE_NAME", name)
        assert dict(RequestTracer(collector.url)._provider.resource.attributes)["service.name"] == expected


@pytest.mark.parametrize(
    ("endpoint", "variables", "expected"),
    [
        (None, {}, False),
        ("http://localhost:4318", {}, True),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4318"}, True),
        (None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://localhost:4318/v1/traces"}, True),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
        ("http://localhost:4318", {"OTEL_SDK_DISABLED": "true"}, False),
        ("http://localhost:4318", {"OTEL_TRACES_EXPORTER": "none"}, False),
    ],
)
def test_what_switches_it_on_and_off(monkeypatch, endpoint, variables, expected):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert is_tracing_wanted(endpoint) is expected


def test_without_the_extra_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(tracing_choice, "_NEEDED", ("opentelemetry.nothing", "nothing_at_all.sdk"))
    assert not is_tracing_wanted(None)
    with pytest.raises(ConfigError, match=r"--otlp-endpoint.*pip install 'moeflow\[otel\]'"):
        is_tracing_wanted("http://localhost:4318")


def test_an_address_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="otlp_endpoint must be an address such as"):
        ServerConfig(otlp_endpoint="localhost:4318")


def test_nothing_of_it_is_imported_where_nobody_asks_for_it():
    program = (
        "import sys; from moeflow.server import app, launch; from moeflow.server.config import ServerConfig\n"
        "app.create_app(None, ServerConfig()); launch.is_tracing_wanted(None)\n"
        "assert not {'opentelemetry.sdk', 'opentelemetry.exporter', 'moeflow.server.tracing'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.slow
def test_a_server_traces_where_the_environment_says_and_sends_the_last_ones_at_its_end(
    collector, monkeypatch, tmp_path
):
    model = tmp_path / "tiny-mixtral"
    write_tiny_mixtral(model, max_position_embeddings=256)
    pack_beside(model)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    server = Server(model)
    try:
        server.wait_until_ready()
        assert server.post(max_tokens=4).status_code == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 0
        assert server.said() == ""
    finally:
        server.process.kill()
        server.process.communicate()
    spans = collector.spans()
    (request,) = [span for name, span in spans.items() if name.startswith("text_completion ")]
    assert values(request.attributes)["gen_ai.usage.output_tokens"] == 4
    assert {"queue", "prefill", "decode"} < set(spans)


def test_operations_are_those_of_paths_that_are_served(engine, tokenizer):
    app = create_app(Generator(engine, tokenizer), ServerConfig())
    assert set(tracing._OPERATIONS) <= set(app.openapi()["paths"])
