"""Servers whose disk lets them down, as their users see it: clear errors for those concerned, nothing for others."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moeflow.checkpoint.packed.layout import SlabSpec
from moeflow.checkpoint.packed.writer import partial_file
from moeflow.kernels.cpu import extension
from moeflow.planner.choices.packed_files import pack
from tests.checkpoint.packed.slabs import flip_bit
from tests.server.live_server import complaints, eventually
from tests.server.server_process import Server
from tests.tiny_mixtral import write_tiny_mixtral

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not extension.is_available() or sys.platform != "linux", reason="needs the kernels, and /proc"),
]

START = """
import dataclasses, sys
from pathlib import Path
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings
from moeflow.server.config import ServerConfig
from moeflow.server.launch import serve
from moeflow.server.logs import start_logs
start_logs("info", "text")

settings = Settings(
    model=sys.argv[1], packed_weights_file=Path(sys.argv[2]), num_threads=1, max_num_seqs=4, max_model_len=256
)
if sys.argv[3] == "streamed":
    memory = resolve(dataclasses.replace(settings, is_served=True, memory_bytes=2**31)).config.memory
    limit_bytes = memory.process_bytes + memory.work_bytes + 16 * 2**20
    settings = dataclasses.replace(settings, memory_bytes=limit_bytes, predictor="none")
config = ServerConfig(port=0, max_engine_restarts=1)
sys.exit(serve(lambda: resolve(dataclasses.replace(settings, is_served=True)).plan, config))
"""


class SlabServer(Server):
    """A server that starts from packed weights."""

    def __init__(self, model: Path, packed_weights_file: Path, how: str) -> None:
        command = [sys.executable, "-c", START, str(model), str(packed_weights_file), how]
        self.folder = packed_weights_file.parent / "tmp"
        self.folder.mkdir()
        environment = {**os.environ, "TMPDIR": str(self.folder)}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        self.url = ""

    def first_token(self, prompt: int) -> tuple[int, str]:
        """Return a status and the token's text, or the error's message."""
        answer = self.post(prompt=[prompt], max_tokens=1)
        body = answer.json()
        return answer.status_code, body["choices"][0]["text"] if answer.is_success else body["error"]["message"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-mixtral")
    write_tiny_mixtral(folder, hidden_size=128, intermediate_size=512, num_local_experts=16, num_hidden_layers=3)
    return folder


@pytest.fixture
def packed_weights_file(model: Path, tmp_path: Path) -> Path:
    return pack(str(model), tmp_path / "mine.slabs", cache_dir=None).path


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Iterator[object]:
    servers: list[SlabServer] = []

    def start(how: str) -> SlabServer:
        servers.append(SlabServer(model, tmp_path / "mine.slabs", how))
        return servers[-1]

    yield start
    for server in servers:
        server.process.kill()
        server.process.communicate()


def spec_of(model: Path, packed_weights_file: Path) -> SlabSpec:
    return pack(str(model), packed_weights_file, cache_dir=None).spec


def test_a_damaged_expert_is_an_error_for_those_who_need_it(model, packed_weights_file, start):
    offset = spec_of(model, packed_weights_file).offset(5) + 99
    flip_bit(packed_weights_file, offset)
    server = start("streamed").wait_until_ready()
    answers = {prompt: server.first_token(prompt) for prompt in range(2, 42)}
    failed = {prompt: message for prompt, (status, message) in answers.items() if status != 200}
    assert 0 < len(failed) < len(answers)
    assert {answers[prompt][0] for prompt in failed} == {500}
    assert all("file mine.slabs, layer 0, expert 5: cannot be read" in message for message in failed.values())
    assert not any(str(packed_weights_file.parent) in message for message in failed.values())
    streamed = server.post(prompt=[next(iter(failed))], max_tokens=1, stream=True).text
    assert json.loads(streamed.split("\n\n")[0].removeprefix("data: "))["error"]["code"] == "generation_failed"
    assert server.status("/health") == server.status("/ready") == 200

    flip_bit(packed_weights_file, offset)  # a backup was copied over it
    assert {prompt: server.first_token(prompt) for prompt in answers if prompt not in failed}.items() <= answers.items()
    assert all(server.first_token(prompt)[0] == 200 for prompt in failed)
    server.process.send_signal(signal.SIGTERM)
    assert server.end() == 0
    log = server.process.stderr.read()
    assert f"file {packed_weights_file}, layer 0, expert 5" in log
    assert "Traceback" not in log
    assert not list(server.folder.iterdir())


@pytest.mark.thorough  # tests/checkpoint/packed/test_resident_reader.py reads such files
def test_damage_outside_of_experts_is_known_before_anything_is_served(model, packed_weights_file, start):
    flip_bit(packed_weights_file, spec_of(model, packed_weights_file).resident_start + 8)
    server = start("streamed")
    _, errors = server.process.communicate(timeout=120)
    assert server.process.returncode == 1
    assert "weights outside of experts, piece 0: cannot be read" in errors
    assert not list(server.folder.iterdir())


def test_a_file_that_was_cut_is_known_before_anything_is_served(packed_weights_file, start):
    os.truncate(packed_weights_file, packed_weights_file.stat().st_size - 4096)
    _, errors = start("streamed").process.communicate(timeout=120)
    assert "it was cut or is another file. Pack the model again" in errors


def test_a_mapped_file_that_is_cut_ends_the_engine_and_with_it_the_server(packed_weights_file, start):
    server = start("resident").wait_until_ready()
    assert server.first_token(7)[0] == 200
    os.truncate(packed_weights_file, 4096)
    assert server.first_token(9)[0] == 503
    assert server.end() == 1
    log = complaints(server.process.stderr.read())
    death, *_, end = log.splitlines()
    assert re.fullmatch(r"the engine has died \(process \d+: SIGBUS, as when a file in use is cut\)", death)
    assert "it was cut or is another file. Pack the model again" in log, "why no other engine could be started"
    assert end.startswith("the engine has died for good")
    assert not list(server.folder.iterdir())


@pytest.mark.thorough  # tests/cli/test_storage_faults.py sends it to `pack`
def test_sigterm_while_the_file_is_made(tmp_path, start):
    server = start("streamed")
    grows = partial_file(tmp_path / "mine.slabs")
    assert eventually(lambda: grows.exists() or (tmp_path / "mine.slabs").exists(), 120)
    server.process.send_signal(signal.SIGTERM)
    assert server.end() == 0
    assert complaints(server.process.stderr.read()) == ""
    assert not list(server.folder.iterdir())
    assert {path.name for path in tmp_path.iterdir()} <= {grows.name, "mine.slabs", "tmp"}
