"""Two fronts before one engine: real processes, which are killed, and requests on connections to either."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import psutil
import pytest

from moeflow.core.errors import ConfigError
from moeflow.engine.generator import Generator
from moeflow.server.app import create_app
from moeflow.server.config import ServerConfig
from moeflow.server.fronts import fronts as fronts_module
from moeflow.server.fronts.fronted_server import FrontedServer
from moeflow.server.fronts.fronts import Fronts
from moeflow.server.jobs.data_folder import Jobs
from moeflow.server.launch import serve_several
from moeflow.server.listener import listen, url
from moeflow.server.model_pool import ModelPool
from moeflow.text.tokenizer import Tokenizer
from tests.patience import PATIENCE_S
from tests.server.fake_client import REPLY, FakeClient
from tests.server.live_server import eventually
from tests.tiny_mixtral import write_byte_tokenizer

KEY_FILE = "[limited]\nkey = 'limited'\nrequests-per-minute = 1\n[free]\nkey = 'free'\n"
pytestmark = pytest.mark.slow
STREAM = {"prompt": "Hi", "max_tokens": 64, "stream": True}
COUNT = "moeflow_request_duration_seconds_count"
MAX_QUEUE = 2


class Server:
    """A server with two fronts, in a thread."""

    def __init__(self, folder, config: ServerConfig) -> None:
        write_byte_tokenizer(folder)
        tokenizer = Tokenizer.load(folder)
        self.engine = FakeClient(tokenizer, max_num_seqs=1)
        self._fronts = Fronts(2, str(folder))
        pool = ModelPool(max_queue=config.max_queue, occupancy=self._fronts.occupancy)
        self.app = create_app(None, config, pool=pool)
        self._generator = Generator(self.engine, tokenizer)
        self._data_folder = folder / "data"
        self._listener = listen(config)
        self.url = url(self._listener)
        self._http = FrontedServer(self.app, self._fronts, max_connections=64)
        self._ready = threading.Event()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        thread.start()
        try:
            assert self._ready.wait(PATIENCE_S)
            yield
        finally:
            self._http.should_exit = True
            thread.join(PATIENCE_S)
            self._listener.close()
            assert not thread.is_alive()

    async def _serve(self) -> None:
        jobs = self.app.state.jobs = Jobs(self._data_folder, self.app.state.service)
        serving = asyncio.create_task(self._http.serve([self._listener]))
        await self._http.attach(self._generator)
        self._ready.set()
        await serving
        await jobs.close()

    @property
    def pids(self) -> list[int]:
        """The processes of the fronts."""
        found = []
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):  # a killed one
                found += [child.pid] if "moeflow.server.fronts.main" in child.cmdline() else []
        return found

    def front_of(self, client: httpx.Client) -> int:
        """Connect a client, and return the process that has its connection."""
        client.get("/health").raise_for_status()
        (connection,) = client._transport._pool.connections  # type: ignore[attr-defined]
        own = connection._connection._network_stream.get_extra_info("client_addr")
        return next(pid for pid in self.pids if _has_connection(pid, own))

    @contextlib.contextmanager
    def clients(self) -> Iterator[tuple[httpx.Client, httpx.Client]]:
        """Yield two clients, connected to different fronts."""
        with contextlib.ExitStack() as stack:
            found: dict[int, httpx.Client] = {}
            while len(found) < 2:
                client = stack.enter_context(
                    httpx.Client(base_url=self.url, timeout=PATIENCE_S, headers={"x-api-key": "free"})
                )
                found.setdefault(self.front_of(client), client)
                time.sleep(0.01)
            first, second = found.values()
            yield first, second


def _has_connection(pid: int, address: tuple[str, int]) -> bool:
    return any(it.raddr == address for it in psutil.Process(pid).net_connections("tcp"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("fronts")
    (folder / "keys.toml").write_text(KEY_FILE)
    server = Server(folder, ServerConfig(port=0, max_queue=MAX_QUEUE, num_fronts=2, api_keys_file=folder / "keys.toml"))
    with server.running():
        yield server


def text_of(lines: Iterator[str]) -> str:
    """Return the text of a stream. Raises: httpx.HTTPError if it is incomplete."""
    events = [line.removeprefix("data: ") for line in lines if line]
    assert events.pop() == "[DONE]"
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


def total(client: httpx.Client, metric: str) -> float:
    """Return the sum of a metric's samples."""
    found = re.findall(rf"^{metric}(?:{{.*}})? (\S+)$", client.get("/metrics").text, re.MULTILINE)
    return sum(map(float, found))


def stream_text(client: httpx.Client) -> str:
    with client.stream("POST", "/v1/completions", json=STREAM) as stream:
        return text_of(stream.iter_lines())


def test_both_fronts_stream_the_same(server):
    with server.clients() as clients:
        assert [stream_text(client) for client in clients] == [REPLY, REPLY]


def test_what_is_shared_is_the_same_at_both(server):
    with server.clients() as (one, other):
        answer = one.post("/v1/responses", json={"input": "Hi"}).raise_for_status().json()
        path = f"/v1/responses/{answer['id']}"
        assert other.get(path).raise_for_status().json() == answer
        next_body = {"input": "Again", "previous_response_id": answer["id"]}
        assert other.post("/v1/responses", json=next_body).status_code == 200
        assert one.delete(path).status_code == 200
        assert other.post("/v1/responses", json=next_body).json()["error"]["code"] == "previous_response_not_found"

        line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": STREAM | {"stream": False}}
        files = {"file": ("in.jsonl", json.dumps(line).encode())}
        file = one.post("/v1/files", files=files, data={"purpose": "batch"}).raise_for_status().json()
        body = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = other.post("/v1/batches", json=body).raise_for_status().json()

        def job() -> dict[str, Any]:
            return one.get(f"/v1/batches/{batch['id']}").raise_for_status().json()

        assert eventually(lambda: job()["status"] == "completed", PATIENCE_S)
        result = other.get(f"/v1/files/{job()['output_file_id']}/content").json()
        assert result["response"]["body"]["choices"][0]["text"] == REPLY


def test_the_server_has_the_stories_of_all_fronts(server):
    with server.clients() as clients:
        answers = [client.post("/v1/completions", json=STREAM | {"stream": False}) for client in clients]
        ids = [answer.headers["x-request-id"] for answer in answers]
        stories = [clients[1 - number].get(f"/stats/requests/{it}") for number, it in enumerate(ids)]
        assert [story.json()["completion_tokens"] for story in stories] == [
            answer.json()["usage"]["completion_tokens"] for answer in answers
        ]

        def running() -> list[str]:
            found = clients[0].get("/stats/requests?state=running").raise_for_status().json()["requests"]
            return [story["id"] for story in found]

        server.engine.pause_after = 1
        with clients[1].stream("POST", "/v1/completions", json=STREAM) as stream:
            assert running() == [stream.headers["x-request-id"]]
            server.engine.pause_after = None
            text_of(stream.iter_lines())
        assert eventually(lambda: running() == [], PATIENCE_S)
        (newest, *_) = clients[0].get("/stats/requests").json()["requests"]
        assert (newest["id"], newest["key"], newest["state"]) == (stream.headers["x-request-id"], "free", "done")


def test_the_queue_has_one_bound(server):
    server.engine.pause_after = 1
    with server.clients() as (one, other), contextlib.ExitStack() as stack:
        for client in (one, other, one):
            stack.enter_context(client.stream("POST", "/v1/completions", json=STREAM))
        refusals = [client.post("/v1/completions", json=STREAM) for client in (one, other)]
        server.engine.pause_after = None
    assert [refusal.status_code for refusal in refusals] == [429, 429]


def test_the_bound_follows_the_number_of_engines(server):
    small, large = server.engine.model, msgspec.structs.replace(server.engine.model, max_num_seqs=2)
    server.engine.model, server.engine.pause_after = large, 1
    with server.clients() as (one, other), contextlib.ExitStack() as stack:

        def is_admitted() -> bool:
            stream = stack.enter_context(other.stream("POST", "/v1/completions", json=STREAM))
            return stream.status_code == 200

        for client in (one, other, one):
            stack.enter_context(client.stream("POST", "/v1/completions", json=STREAM))
        assert eventually(is_admitted, PATIENCE_S)
        server.engine.model, server.engine.pause_after = small, None


def test_forwarded_requests_are_the_clients(server):
    host, port = httpx.URL(server.url).host, httpx.URL(server.url).port
    heads = []
    for target in ("/", "/x#y"):
        with socket.create_connection((host, port), timeout=PATIENCE_S) as raw:
            raw.sendall(f"GET {target} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode())
            heads.append(b"".join(iter(lambda raw=raw: raw.recv(1 << 16), b"")).partition(b"\r\n\r\n")[0].lower())
    page, invalid = heads
    assert b" 200 " in page
    assert b"content-encoding" not in page
    assert b" 400 " in invalid


def test_a_killed_front_loses_only_its_own_connections(server):
    with server.clients() as (victim, other):
        pid, before = server.front_of(victim), total(other, COUNT)
        stream_text(victim)
        assert eventually(lambda: total(other, COUNT) >= before + 1, PATIENCE_S)
        server.engine.pause_after = 3
        with (
            victim.stream("POST", "/v1/completions", json=STREAM) as lost,
            other.stream("POST", "/v1/completions", json=STREAM) as kept,
        ):
            assert eventually(lambda: len(server.engine.live) == 2, PATIENCE_S)
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(httpx.HTTPError):
                text_of(lost.iter_lines())
            assert eventually(lambda: len(server.engine.live) == 1, PATIENCE_S), "its request is cancelled"
            server.engine.pause_after = None
            assert text_of(kept.iter_lines()) == REPLY
        assert eventually(lambda: server.app.state.service.models.num_unfinished == 0, PATIENCE_S)
        assert eventually(lambda: total(other, COUNT) >= before + 2, PATIENCE_S), "counts outlive it"
    with server.clients() as clients:  # there are two again
        assert [stream_text(client) for client in clients] == [REPLY, REPLY]


def test_a_stopped_front_is_replaced(server, monkeypatch):
    monkeypatch.setattr(fronts_module, "LOST_S", 0.5)
    before = set(server.pids)
    victim = min(before)
    os.kill(victim, signal.SIGSTOP)
    assert eventually(lambda: victim not in server.pids and len(server.pids) == len(before), PATIENCE_S)
    with server.clients() as clients:
        assert [stream_text(client) for client in clients] == [REPLY, REPLY]


def test_a_key_with_limits_has_them_once(server):
    body = {"prompt": "Hi", "max_tokens": 1}
    with server.clients() as clients:
        headers = {"x-api-key": "limited"}
        answers = [client.post("/v1/completions", json=body, headers=headers) for client in clients]
    assert sorted(answer.status_code for answer in answers) == [200, 429]


def test_a_client_that_leaves_cancels_its_request(server):
    server.engine.pause_after = 2
    with server.clients() as (one, _):
        with one.stream("POST", "/v1/completions", json=STREAM):
            assert eventually(lambda: len(server.engine.live) == 1, PATIENCE_S)
        assert eventually(lambda: not server.engine.live, PATIENCE_S)
    server.engine.pause_after = None


def test_fronts_know_why_streams_end(server):
    """The last test with this server: its engine dies."""
    server.engine.pause_after = 2
    with server.clients() as (one, other):
        with one.stream("POST", "/v1/completions", json=STREAM) as stream:
            assert eventually(lambda: len(server.engine.live) == 1, PATIENCE_S)
            server.engine.die()
            assert '"code":"engine_unavailable"' in list(stream.iter_lines())[-2]

        def answer() -> httpx.Response:
            return other.post("/v1/completions", json=STREAM)

        assert eventually(lambda: answer().status_code == 503, PATIENCE_S)
        assert answer().json()["error"]["code"] == "engine_unavailable"


def test_several_models_have_one_front():
    with pytest.raises(ConfigError, match="several fronts serve one model"):
        serve_several({}, 0, ServerConfig(num_fronts=2))
