"""The whole server as its users start it: a real engine in its own process, signals, deaths, the way out."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from click.testing import CliRunner

from moeflow.cli.chaos.chaos import chaos
from moeflow.server import launch
from tests.packed import pack_beside
from tests.server.live_server import eventually
from tests.server.server_process import LONG, Server
from tests.tiny_mixtral import write_tiny_mixtral

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-mixtral")
    write_tiny_mixtral(folder, max_position_embeddings=4096)
    pack_beside(folder)
    return folder


@pytest.fixture
def server(model: Path) -> Iterator[Server]:
    yield from running(Server(model))


@pytest.fixture
def hasty_server(model: Path) -> Iterator[Server]:
    """One that cuts requests off at once."""
    yield from running(Server(model, deadline_s=0))


def running(server: Server) -> Iterator[Server]:
    try:
        server.wait_until_ready()
        yield server
        engine = server.engine() if server.process.poll() is None else None
        server.process.send_signal(signal.SIGTERM)
        server.end()
        assert engine is None or not engine.is_running(), "the engine outlived its server"
    finally:
        server.process.kill()
        server.process.communicate()


def test_serves_and_ends_in_order(server):
    assert server.status("/health") == server.status("/ready") == server.status("/") == 200
    answer = server.post(max_tokens=8).json()
    assert answer["usage"]["completion_tokens"] == 8
    again = server.post(max_tokens=8, prompt=[5, 6, 7]).json()
    assert again["choices"] == answer["choices"]
    assert server.engine().status() != psutil.STATUS_ZOMBIE
    server.process.send_signal(signal.SIGTERM)
    assert server.end() == 0
    assert server.said() == ""


def test_a_running_request_may_finish(server):
    thread, responses = server.in_background()
    server.process.send_signal(signal.SIGINT)
    assert eventually(lambda: server.status("/ready") == 503, 2)
    assert server.status("/health") == 200
    refused = server.post()
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "shutting_down"
    assert server.end() == 0
    thread.join()
    assert responses[0].status_code == 200
    assert responses[0].json()["usage"]["completion_tokens"] == LONG["max_tokens"]


def test_at_the_deadline_requests_are_cut_off_with_a_reason(hasty_server):
    thread, responses = hasty_server.in_background()
    stream_thread, streams = hasty_server.in_background(stream=True)
    hasty_server.process.send_signal(signal.SIGTERM)
    assert hasty_server.end() == 0
    thread.join()
    stream_thread.join()
    assert responses[0].status_code == 503
    assert responses[0].json()["error"]["code"] == "shutting_down"
    last = streams[0].text.split("\n\n")[-2]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutting_down"


def test_a_second_signal_ends_at_once(server):
    threads = [server.in_background(prompt=[n + 3], n=8)[0] for n in range(4)]
    server.process.send_signal(signal.SIGINT)
    assert eventually(lambda: server.status("/ready") == 503, 2)
    server.process.send_signal(signal.SIGINT)
    assert server.end(15) == 128 + signal.SIGINT  # half the deadline, on a busy machine
    for thread in threads:
        thread.join()


@pytest.fixture
def mortal_server(model: Path) -> Iterator[Server]:
    """One that does not start its engine again."""
    yield from running(Server(model, max_restarts=0))


def test_an_engine_that_may_not_start_again_ends_its_requests_and_the_server(mortal_server):
    thread, responses = mortal_server.in_background()
    stream_thread, streams = mortal_server.in_background(stream=True)
    pid = mortal_server.engine().pid
    mortal_server.engine().kill()
    thread.join(5)
    stream_thread.join(5)
    assert responses[0].status_code == 503
    assert "died" in responses[0].json()["error"]["message"]
    assert '"code":"engine_unavailable"' in streams[0].text
    assert mortal_server.end() == 1
    reason = f"process {pid}: SIGKILL, not for lack of memory: another process sent it"
    assert mortal_server.said() == (
        f"the engine has died ({reason})\n"
        f"the engine has died for good ({reason}): 0 restarts within an hour are all that it may have\n"
    )


def test_a_killed_engine_goes_on_with_its_requests_anew_and_goes_with_its_server(server):
    bodies = [{"temperature": 0.8, "seed": 3}, {"stream": True}, {"stream": True, "n": 2, "seed": 4, "temperature": 1}]
    bodies = [body | {"max_tokens": 2500} for body in bodies]
    calm = [server.post(**body) for body in bodies]
    disturbed = [server.in_background(**body) for body in bodies]
    first = server.engine()
    first.kill()
    assert eventually(lambda: server.status("/ready") == 503, 5)
    assert server.status("/health") == 200
    waiting = threading.Thread(target=lambda: disturbed.append((waiting, [server.post(max_tokens=5)])))
    waiting.start()
    for thread, _ in disturbed:
        thread.join(60)
    waiting.join(60)
    for before, (_, (after,)) in zip(calm, disturbed, strict=False):
        assert after.status_code == 200
        assert content(after) == content(before)
    assert disturbed[-1][1][0].json()["usage"]["completion_tokens"] == 5
    assert server.engine().pid != first.pid
    assert server.status("/ready") == 200
    stats = httpx.get(f"{server.url}/stats").json()
    assert (stats["engine_restarts_total"], stats["num_running"], stats["kv_blocks_used"]) == (1, 0, 0)
    numbers = httpx.get(f"{server.url}/metrics").text
    assert re.search(r"^moeflow_engine_restarts_total\{model=\"[^\"]+\"\} 1\.0$", numbers, re.MULTILINE)

    faults = ["--faults", "engine-killed,clients-cut", "--duration", "0.1", "--streams", "2", "--tokens", "64"]
    declined = CliRunner().invoke(chaos, [server.url], input="n\n")
    assert (declined.exit_code, f"engine {server.engine().pid}" in declined.output) == (1, True)
    command = [server.url, "--yes", "--json", *faults]
    found = CliRunner().invoke(chaos, command, catch_exceptions=False, standalone_mode=False)
    rows = json.loads(found.stdout)["rows"]
    assert [(row["fault"], row["problems"]) for row in rows] == [("engine-killed", []), ("clients-cut", [])]
    assert found.return_value == 0
    assert rows[0]["target"].startswith("engine ")
    assert rows[0]["back_s"] > rows[0]["seen_s"]

    engine = server.engine()  # goes, too, when the server is killed
    server.process.kill()
    assert server.end() == -signal.SIGKILL
    assert eventually(lambda: not engine.is_running(), 10)


def content(response: httpx.Response) -> list[object]:
    """What an answer says, apart from when and under which id; of a stream, each completion for itself."""
    if "data: " not in response.text:
        return [response.json()["choices"], response.json()["usage"]]
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    return sorted(
        (choice["index"], number, choice["text"], choice["finish_reason"])
        for number, choice in enumerate(sorted(choices, key=lambda choice: choice["index"]))
    )


def test_a_signal_while_loading_ends_in_order(model):
    server = Server(model)
    try:
        assert eventually(lambda: bool(server.engines()), 30)
        engine = server.engine()
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 0
        assert not engine.is_running()
    finally:
        server.process.kill()
        server.process.communicate()


def test_a_signal_at_the_moment_of_being_loaded_is_not_lost():
    async def loaded() -> str:
        return "model"

    async def both() -> tuple[str | int, int]:
        signals: asyncio.Queue[int] = asyncio.Queue()
        signals.put_nowait(signal.SIGTERM)
        return await launch._unless(signals, loaded()), signals.get_nowait()

    assert asyncio.run(both()) == ("model", signal.SIGTERM)


def test_a_port_in_use_is_known_before_anything_is_loaded(model):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = Server(model, port=port)
        _, errors = server.process.communicate(timeout=30)
    assert server.process.returncode == 1
    assert "ConfigError" in errors
    assert f"port {port}: the port is in use" in errors


def test_a_model_that_cannot_be_loaded_is_an_error_not_a_hang(model, tmp_path):
    damaged = shutil.copytree(model, tmp_path / "model")
    (damaged / "tokenizer.json").write_text("{}")
    server = Server(damaged)
    _, errors = server.process.communicate(timeout=60)
    assert server.process.returncode == 1
    assert "CheckpointError" in errors
    assert "tokenizer.json" in errors
