"""`moeflow pull` as a process: from nothing to an answer, and killed or interrupted downloads resume."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.checkpoint.hub.hub_server import running_hub
from tests.packed import know_this_machine
from tests.tiny_mixtral import write_tiny_mixtral

MOEFLOW = (sys.executable, "-m", "moeflow.cli.main")


class Shell:
    """The command with a hub, a cache and a home of its own."""

    def __init__(self, hub, folder: Path) -> None:
        self.cache = folder / "hf" / "hub"
        clean = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "hf"), "MOEFLOW_CACHE": str(folder / "cache")}
        self.environment = clean | own
        know_this_machine(folder / "cache")

    def start(self, *args: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen([*MOEFLOW, *args], env=self.environment, stdout=pipe, stderr=pipe, text=True)

    def run(self, *args: str, **environment: str) -> subprocess.CompletedProcess[str]:
        whole = self.environment | environment
        return subprocess.run([*MOEFLOW, *args], env=whole, capture_output=True, text=True, timeout=120)

    def partial_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.cache.rglob("*.incomplete"))


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_tiny_mixtral(folder)
    with running_hub() as hub:
        hub.add_folder("tiny/Mixtral", folder)
        hub.add("big/Model-GGUF", {"Model-Q4_K_M.gguf": random.Random(0).randbytes(4_000_000)})
        yield hub


@pytest.fixture
def shell(hub, tmp_path) -> Shell:
    hub.cuts_left, hub.wait_s, hub.chunk_bytes = 0, 0.0, 1 << 16
    return Shell(hub, tmp_path)


@pytest.mark.slow
def test_from_nothing_to_an_answer_in_three_commands(hub, shell):
    hub.cuts_left, hub.chunk_bytes = 20, 10_000
    pulled = shell.run("pull", "tiny/Mixtral")
    assert pulled.returncode == 0, pulled.stderr
    assert "tiny/Mixtral is here: " in pulled.stdout

    listed = shell.run("list")
    assert [line.split()[:2] for line in listed.stdout.splitlines()] == [
        ["NAME", "FORMAT"],
        ["tiny/Mixtral", "safetensors"],
    ]
    (row,) = json.loads(shell.run("list", "--json").stdout)
    assert (row["family"], row["is_supported"], row["problem"]) == ("mixtral", True, None)
    for name, data in hub.repositories["tiny/Mixtral"].files.items():
        assert Path(row["path"], name).read_bytes() == data

    answered = shell.run("generate", "tiny/Mixtral", "-p", "abc", "--max-tokens", "4", "--temperature", "0", "--json")
    assert answered.returncode == 0, answered.stderr
    answer = json.loads(answered.stdout)
    assert (answer["model"], len(answer["results"][0]["token_ids"])) == ("tiny/Mixtral", 4)


@pytest.mark.slow
def test_a_pull_that_is_killed_or_interrupted_goes_on_where_it_was(hub, shell):
    data = hub.repositories["big/Model-GGUF"].files["Model-Q4_K_M.gguf"]
    hub.wait_s, hub.chunk_bytes = 0.02, 20_000
    sizes = [0]
    for number in (signal.SIGKILL, signal.SIGINT, signal.SIGTERM):
        running = shell.start("pull", "big/Model-GGUF")
        wait_for(lambda: shell.partial_bytes() > sizes[-1] + 200_000, running)
        running.send_signal(number)
        said = running.communicate(timeout=20)[1]
        sizes.append(shell.partial_bytes())
        assert sizes[-1] >= sizes[-2] + 200_000
        if number == signal.SIGINT:
            assert running.returncode == 130
            assert "`moeflow pull big/Model-GGUF` resumes the download" in said
            assert said.count("Stopped") == 1
    assert "of an interrupted download" in shell.run("list").stdout
    hub.wait_s = 0.0
    before = sum(it.on_cdn for it in hub.requests)
    done = shell.run("pull", "big/Model-GGUF", "--json")
    assert done.returncode == 0, done.stderr
    assert Path(json.loads(done.stdout)["path"]).read_bytes() == data
    assert [it.range for it in hub.requests if it.on_cdn][before:] == [f"bytes={sizes[-1]}-"]


def wait_for(is_so, running: subprocess.Popen[str]) -> None:
    for _ in range(1000):
        if is_so():
            return
        assert running.poll() is None, running.communicate()
        time.sleep(0.02)
    raise AssertionError("it never came to that")


@pytest.mark.slow
def test_two_pulls_of_the_same_file_share_the_work(hub, shell):
    hub.wait_s, hub.chunk_bytes = 0.005, 40_000
    both = [shell.start("pull", "big/Model-GGUF", "--json") for _ in range(2)]
    outputs = [running.communicate(timeout=60) for running in both]
    assert [running.returncode for running in both] == [0, 0], outputs
    assert len({json.loads(out)["path"] for out, _ in outputs}) == 1
    assert not list(shell.cache.rglob("*.incomplete"))
