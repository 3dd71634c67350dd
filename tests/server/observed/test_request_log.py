"""Every request has an id and, at its end, one log line with what came of it, never with its prompt."""

from __future__ import annotations

import io
import json
import logging
import re
import subprocess
import sys

import httpx
import openai
import pytest

from moeflow.core.errors import ConfigError
from moeflow.server.config import ServerConfig
from moeflow.server.logs import JsonLines, TextLines, configure_logs
from tests.packed import pack_beside
from tests.server.conftest import connect
from tests.server.live_server import eventually, serve_in_thread
from tests.tiny_mixtral import write_byte_tokenizer, write_tiny_mixtral

SECRET = "xyzzy-secret"
CHAT = {"messages": [{"role": "user", "content": SECRET}]}


@pytest.fixture
def lines():
    """Collect the fields of each request's line, and what the lines look like in both forms."""
    handler = Collector()
    log = logging.getLogger("moeflow")
    log.addHandler(handler)
    level = log.level
    log.setLevel(logging.DEBUG)
    yield handler
    log.setLevel(level)
    log.removeHandler(handler)


class Collector(logging.Handler):
    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        self.records.append(record)

    def requests(self):
        return [record.fields for record in self.records if record.name == "moeflow.server.request_log"]

    def one(self):
        (fields,) = self.requests()
        return fields

    def level_name(self):
        (record,) = (record for record in self.records if record.name == "moeflow.server.request_log")
        return record.levelname

    def text(self):
        return "\n".join(form.format(record) for form in (TextLines(), JsonLines()) for record in self.records)


@pytest.mark.anyio
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_succeeds(http, engine, lines, stream):
    engine.num_cached_tokens = 3
    response = await http.post("/v1/chat/completions", json={**CHAT, "stream": stream, "max_tokens": 5})
    line = lines.one()
    assert line["id"] == response.headers["x-request-id"]
    assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/chat/completions", 200)
    assert (line["completion_tokens"], line["cached_tokens"], line["end"]) == (5, 3, "length")
    assert line["prompt_tokens"] == len(engine.submissions[0].prompt_token_ids)
    assert 0 < line["first_token_s"] <= line["total_s"]
    assert line["queue_s"] == 0.25
    assert line["client"] == "127.0.0.1"
    assert lines.level_name() == "INFO"
    assert SECRET not in lines.text()


@pytest.mark.anyio
async def test_several_completions_are_one_line(http, lines):
    await http.post("/v1/completions", json={"prompt": ["ab", "cde"], "n": 2, "max_tokens": 3})
    line = lines.one()
    assert (line["prompt_tokens"], line["completion_tokens"], line["end"]) == (5, 12, "length")


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status", "end"),
    [
        ("POST", "/v1/chat/completions", {**CHAT, "top_p": 7}, {}, 400, "invalid_value"),
        ("POST", "/v1/completions", {"prompt": SECRET * 100}, {}, 400, "context_length_exceeded"),
        ("POST", "/v1/completions", {"prompt": SECRET, "model": "other"}, {}, 404, "model_not_found"),
        ("POST", "/v1/completions", {"prompt": SECRET}, {"origin": "null"}, 403, "origin_not_allowed"),
        ("POST", "/v1/completions", {"prompt": SECRET}, {"host": "evil.example"}, 403, "host_not_allowed"),
        ("GET", "/v1/nothing", None, {}, 404, "not_found"),
        ("PUT", "/health", None, {}, 405, "method_not_allowed"),
        ("GET", "/v1/files", None, {}, 503, "no_data_folder"),
    ],
)
async def test_a_request_that_is_refused(http, lines, method, path, body, headers, status, end):
    response = await http.request(method, path, json=body, headers=headers)
    line = lines.one()
    assert (line["status"], line["end"], line["path"]) == (response.status_code, end, path) == (status, end, path)
    assert line["id"] == response.headers["x-request-id"]
    error = response.json()["error"]
    assert (line["error"], line.get("param")) == (error["message"], error["param"])
    assert "completion_tokens" not in line
    assert SECRET not in lines.text()


@pytest.mark.anyio
async def test_without_a_key(make_app, lines):
    async with connect(make_app(api_key="sesame")) as http:
        response = await http.get("/v1/models", headers={"authorization": "Bearer xyzzy-secret"})
    assert (lines.one()["end"], lines.one()["id"]) == ("invalid_api_key", response.headers["x-request-id"])
    assert SECRET not in lines.text()


@pytest.mark.anyio
@pytest.mark.parametrize(("stream", "status"), [(False, 500), (True, 200)])
async def test_a_request_that_fails_in_the_middle(http, engine, lines, stream, status):
    engine.fail_after = 2
    response = await http.post("/v1/chat/completions", json={**CHAT, "stream": stream})
    line = lines.one()
    assert (response.status_code, line["status"], line["end"]) == (status, status, "generation_failed")
    assert line["completion_tokens"] == 2
    assert line["error"] in response.text
    assert lines.level_name() == "WARNING"


@pytest.mark.anyio
async def test_a_fault_of_ours_has_a_line_and_an_id_too(http, app, lines, monkeypatch):
    monkeypatch.setattr(app.state.service, "require_model", lambda *args, **fields: 1 / 0)
    response = await http.post("/v1/chat/completions", json=CHAT)
    assert response.status_code == 500
    assert (lines.one()["end"], lines.one()["id"]) == ("internal_error", response.headers["x-request-id"])


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves(app, engine, lines, stream):
    engine.pause_after = 3
    with serve_in_thread(app) as url:
        with httpx.Client() as client, pytest.raises(httpx.ReadTimeout):
            client.post(f"{url}/v1/chat/completions", json={**CHAT, "stream": stream}, timeout=0.5)
        assert eventually(lambda: len(lines.requests()) == 1)
    line = lines.one()
    assert (line["end"], line["completion_tokens"]) == ("disconnected", 3)
    assert line["status"] == (200 if stream else 499)


def test_what_is_not_http_has_a_line(app, lines):
    with serve_in_thread(app) as url, httpx.Client() as client:
        client.get(url, headers={"x": "y" * 400_000})
    assert (lines.one()["status"], lines.one()["end"]) == (431, "invalid_http")
    assert lines.one()["error"].startswith("This is not a valid HTTP request")


@pytest.mark.anyio
async def test_probes_and_the_page_are_for_debugging(http, lines):
    document = await http.get("/")
    script = re.search(r'src="([^"]+)"', document.text)[1]
    for path in ("/health", "/ready", "/stats", "/metrics", "/api/version", f"/{script}", "/openapi.json"):
        assert (await http.get(path)).status_code == 200
    records = [record for record in lines.records if record.name == "moeflow.server.request_log"]
    assert [record.levelname for record in records] == ["DEBUG"] * 8


@pytest.mark.anyio
async def test_prompts_are_logged_only_where_the_server_was_told_so(make_app, lines):
    async with connect(make_app(log_prompts=True)) as http:
        await http.post("/v1/chat/completions", json=CHAT)
        await http.post("/v1/completions", json={"prompt": [[5, 6]]})
    assert [fields["prompt"] for fields in lines.requests()] == [[{"role": "user", "content": SECRET}], [[5, 6]]]


@pytest.mark.anyio
@pytest.mark.parametrize("given", ["abc-123", "Root=1-67891233-abcdef01", "A" * 128, "0"])
async def test_a_clients_own_id_is_kept(http, lines, given):
    response = await http.get("/v1/models", headers={"x-request-id": given})
    assert response.headers["x-request-id"] == lines.one()["id"] == given


@pytest.mark.anyio
@pytest.mark.parametrize("given", ["", "a b", "A" * 129, 'a"b', "ü", "a\tb", "a;b"])
async def test_an_id_that_could_disturb_a_log_is_replaced(http, given):
    answers = [await http.get("/v1/models", headers={"x-request-id": given.encode()}) for _ in range(2)]
    ids = {response.headers["x-request-id"] for response in answers}
    assert len(ids) == 2
    assert all(re.fullmatch(r"req_[0-9a-f]{32}", each) for each in ids)


def test_openais_client_shows_the_id(app):
    with serve_in_thread(app) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        answer = client.chat.completions.create(model="fake-model", messages=CHAT["messages"])
        assert answer._request_id.startswith("req_")
        with pytest.raises(openai.NotFoundError) as caught:
            client.chat.completions.create(model="other", messages=CHAT["messages"])
        assert caught.value.request_id.startswith("req_")


def record(message="all is well", **fields):
    made = logging.LogRecord("moeflow.x", logging.INFO, "", 0, message, None, None)
    made.fields = fields
    return made


def test_the_forms_of_a_line():
    fields = {"id": "req_1", "status": 200, "total_s": 0.5, "prompt": 'a "b"\nc', "path": "/v1/x"}
    text = TextLines().format(record(**fields))
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00 INFO moeflow\.x: all is well id=req_1 status=200 total_s=0\.5 "
        r'prompt="a \\"b\\"\\nc" path=/v1/x',
        text,
    )
    line = json.loads(JsonLines().format(record(**fields)))
    assert line.items() >= {"level": "info", "logger": "moeflow.x", "message": "all is well", **fields}.items()


def test_a_traceback_stays_in_its_json_line():
    try:
        raise ValueError("boom")
    except ValueError as error:
        made = record()
        made.exc_info = (ValueError, error, error.__traceback__)
    line = JsonLines().format(made)
    assert "\n" not in line
    assert "ValueError: boom" in json.loads(line)["exception"]
    assert "ValueError: boom" in TextLines().format(made).splitlines()[-1]


@pytest.fixture
def root():
    """Give the loggers that are configured back as they were."""
    loggers = [logging.getLogger(name) for name in (None, "moeflow", "asyncio")]
    before = [(log, log.level, log.handlers[:]) for log in loggers]
    yield loggers[0]
    for log, level, handlers in before:
        log.setLevel(level)
        log.handlers[:] = handlers


@pytest.mark.parametrize(("level", "shown"), [("debug", "dike"), ("info", "ike"), ("warning", "ke"), ("error", "e")])
def test_what_each_level_shows(root, level, shown):
    stderr = io.StringIO()
    configure_logs(level, "json", stderr)
    own = logging.getLogger("moeflow.server.request_log")
    own.debug("d")
    own.info("i")
    own.warning("k")
    own.error("e")
    logging.getLogger("somebody.else").info("never")
    assert "".join(json.loads(line)["message"] for line in stderr.getvalue().splitlines()) == shown


@pytest.mark.parametrize("setting", ["log_level", "log_format"])
def test_a_form_or_level_that_there_is_none_of(setting):
    with pytest.raises(ConfigError, match=setting):
        ServerConfig(**{setting: "loud"})


NOISE = """
import logging, subprocess, sys, warnings
from moeflow.server.logs import start_logs
start_logs("info", "json")
print("warning: plain text", file=sys.stderr)
subprocess.run([sys.executable, "-c", sys.argv[1]], check=True)
logging.getLogger("moeflow.x").warning("its own")
raise ValueError("boom")
"""
CHILD = """
import logging, os
os.write(2, b"2026-11-22 19:20:26,421 WARNING moeflow.engine: the engine ends\\n")
os.write(2, b"from native code, \\xff\\n")
"""


def json_lines(text: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in text.splitlines()]


def test_with_json_all_that_a_process_and_its_children_write_to_stderr_is_json():
    done = subprocess.run([sys.executable, "-c", NOISE, CHILD], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    said = {(line["level"], line["logger"], line["message"]) for line in json_lines(done.stderr)}
    assert said >= {
        ("warning", "moeflow", "plain text"),
        ("warning", "moeflow.engine", "the engine ends"),
        ("info", "moeflow", "from native code, \\xff"),
        ("warning", "moeflow.x", "its own"),
        ("info", "moeflow", "ValueError: boom"),
    }


@pytest.mark.slow
def test_with_json_a_server_writes_json_from_its_first_line_to_its_last(tmp_path):
    write_tiny_mixtral(tmp_path / "model")
    write_byte_tokenizer(tmp_path / "model")
    pack_beside(tmp_path / "model", tmp_path)
    (tmp_path / "jobs").write_text("no folder")
    command = [sys.executable, "-m", "moeflow", "serve", "--log-format", "json", "--cache-dir", str(tmp_path)]
    options = ["--port", "0", "--threads", "1", "--host", "0.0.0.0", "--shutdown-deadline", "0"]
    arguments = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, *options, str(tmp_path / "model")], **arguments) as server:
        begun = json.loads(server.stdout.readline())
        assert begun.items() >= {"level": "info", "models": "model"}.items()
        answer = httpx.get(f"{begun['url']}/v1/nothing")
        server.terminate()
        rest, log = server.communicate(timeout=60)
    assert rest == ""
    lines = json_lines(log)
    assert [line["level"] for line in lines if "set an API key" in line["message"]] == ["warning"]
    assert any("no /v1/files" in line["message"] for line in lines)
    assert answer.headers["x-request-id"] in [line.get("id") for line in lines]


def test_with_json_the_reason_for_a_failed_start_is_json(tmp_path):
    command = [sys.executable, "-m", "moeflow", "serve", "--log-format", "json", "--cache-dir", str(tmp_path)]
    done = subprocess.run([*command, str(tmp_path / "none")], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert [line["level"] for line in json_lines(done.stderr)] == ["error"]
