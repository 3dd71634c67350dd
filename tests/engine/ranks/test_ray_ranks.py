"""Ranks that a real Ray cluster starts: on nodes with a network and files of their own, killed one after the other."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from moeflow.engine.engine import Engine
from moeflow.kernels.cpu import extension
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings
from studies.harness.ray_nodes import PATIENCE_S, PORT, Node, networked, start_all
from tests.engine.ranks.ray_server import asked
from tests.server.jobs.requests import completion_line, read_lines, write_lines
from tests.tiny_mixtral import write_tiny_mixtral

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not extension.is_available(), reason=extension.why_not()),
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install 'moeflow[ray]'"
    ),
]
PROMPTS = [[5, 9, 200, 31, 7], list(range(2, 150))]
NUM_LINES = 24
KEEPER = "moeflow.processes.cluster.ray_keeper"
ENGINE = "moeflow.processes.main"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_mixtral(folder, num_local_experts=5)
    return folder


@pytest.fixture(scope="module")
def missing(model) -> Path:
    """A model that only the first node will have."""
    folder = model.parent / "missing"
    write_tiny_mixtral(folder, num_local_experts=5)
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Iterator[Path]:
    """A home that has a token of other clusters."""
    folder = tmp_path_factory.mktemp("home")
    (folder / ".ray").mkdir()
    (folder / ".ray" / "auth_token").write_text("0123456789abcdef" * 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(folder))
        yield folder


@pytest.fixture(scope="module")
def nodes(missing, home) -> Iterator[list[Node]]:
    with contextlib.ExitStack() as undo:
        try:
            nodes = undo.enter_context(networked(3))
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces here: {error}")
        for node in nodes[1:]:
            node.hide(missing)
        start_all(nodes, Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="ray-"))))  # socket names are short
        yield nodes


class Server:
    """A process on the first node."""

    def __init__(self, node: Node, cache_dir: Path) -> None:
        self._address, self._cache_dir = node.address, cache_dir
        self.hosts: list[str] = []  # of ranks, at the last answer
        self.ready = 0  # replicas, at the last answer
        self._log = cache_dir / "server.log"
        command = [*node.prefix, sys.executable, "-m", "tests.engine.ranks.ray_server"]
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )

    def said(self) -> str:
        return self._log.read_text()

    def tell(self, **what) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def hear(self) -> dict:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.said()
        return json.loads(line)

    def start(self, model: Path, patience_s: float = PATIENCE_S, **changes) -> str:
        """Start engines; return what keeps them from it."""
        settings = {
            "model": str(model),
            "kv_cache_bytes": 1 << 22,
            "num_threads": 1,
            "cache_dir": str(self._cache_dir),
            "num_ranks": 2,
            "ray_address": f"{self._address}:{PORT}",
        }
        self.tell(start=settings | changes, patience_s=patience_s)
        return self.hear()["error"]

    def ask(self, disturb=lambda: None) -> tuple[list[list[int]], int]:
        """Return tokens, and how often the engine was started again; disturb it while it computes them."""
        self.tell(ask=PROMPTS)
        assert self.hear() == {"begun": True}
        disturb()
        found = self.hear()
        self.hosts, self.ready = found["hosts"], found["ready"]
        return found["tokens"], found["restarts"]

    def run_batch(self, source: Path, disturb=lambda: None) -> list[tuple[str, str]]:
        """Return ids and texts of a job's results; disturb it once some of it is done."""
        self.tell(batch=str(source))
        assert self.hear() == {"begun": True}
        disturb()
        assert self.hear() == {"completed": NUM_LINES}
        lines = read_lines(source.with_suffix(".out"))
        return [(line["custom_id"], line["response"]["body"]["choices"][0]["text"]) for line in lines]


@pytest.fixture(scope="module")
def server(nodes, tmp_path_factory) -> Iterator[Server]:
    server = Server(nodes[0], tmp_path_factory.mktemp("server"))
    with server.process:
        try:
            yield server
        finally:
            server.process.kill()


def answers(model: Path) -> list[list[int]]:
    """Return those of one process."""
    engine = Engine.load(resolve(Settings(model=str(model), kv_cache_bytes=1 << 22, num_threads=1)).config)
    tokens: dict[str, list[int]] = {}
    for each in asked(PROMPTS):
        engine.submit(each)
        tokens[each.request_id] = []
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
    engine.close()
    return list(tokens.values())


def nodes_text(nodes) -> str:
    each = ", ".join(f"{node.address} with 1 CPU" for node in nodes)
    return f"{len(nodes)} active nodes ({each}), 0/{len(nodes)} CPU used"


def test_what_the_cluster_or_its_nodes_lack_is_said_at_the_start(server, nodes, model, missing):
    first, *others = nodes
    assert server.start(model, 3.0, num_ranks=4) == (
        "CapacityError: 3 other ranks need 3 nodes besides the first rank's with 1 free CPU each (--threads), and "
        f"there were none for 3 s; the cluster has {nodes_text(nodes)}. Add nodes (`ray start --address=HOST:PORT` on "
        "them), or use fewer ranks (--ranks) or threads (--threads), or let ranks share nodes (--ray-placement spread)"
    )
    assert "ranks need 3 nodes" in server.said()  # before the time was up
    error = server.start(model, listen_ranks="9200")
    assert "cannot reach this one at 127.0.0.1: name an address of this machine that they can" in error
    assert error.endswith(f"(--listen-ranks {first.address}:PORT)")
    of_engine = server.start(model, listen_ranks="9200", num_ranks=None, num_replicas=1)
    assert of_engine.partition(" cannot ")[2] == error.partition(" cannot ")[2]
    error = server.start(missing)
    assert "has no such checkpoint" in error
    assert str(missing) in error
    assert server.start(model, ray_address=f"{first.address}:1").startswith("ConfigError: no Ray cluster answers at")
    for node in others:
        node.expect(KEEPER, 0)


def test_replicas_run_on_nodes_and_go_on_in_each_other(server, nodes, model, tmp_path):
    alone = {"num_ranks": None}
    assert server.start(model, num_replicas=1, **alone) == ""
    want = answers(model)
    assert server.ask() == (want, 0)
    one, two = (
        write_lines(
            tmp_path / name,
            *(
                completion_line(str(n), f"Story {n}", max_tokens=20 + 7 * n % 40, temperature=0)
                for n in range(NUM_LINES)
            ),
        )
        for name in ("one", "two")
    )
    texts = server.run_batch(one)
    assert [custom_id for custom_id, _ in texts] == [str(n) for n in range(NUM_LINES)]

    server.tell(scale=2)
    assert server.hear() == {"error": ""}
    while server.ready < 2:
        assert server.ask() == (want, 0)
    homes = [node for node in nodes if node.pids(ENGINE)]
    assert len(homes) == 2

    assert server.run_batch(two, lambda: homes[0].kill(ENGINE)) == texts
    assert server.ask() == (want, 1)
    while server.ready < 2:
        assert server.ask() == (want, 1)
    assert server.ask(lambda: homes[1].kill(KEEPER))[0] == want  # its keeper, and so its engine
    while server.ready < 2:
        assert server.ask()[0] == want
    leaving = next(node for node in nodes if node.pids(KEEPER))
    assert server.ask(lambda: [os.kill(pid, signal.SIGTERM) for pid in leaving.pids(KEEPER)])[0] == want
    leaving.expect(KEEPER, 0)
    assert [line.endswith(" has left") for line in server.said().splitlines()].count(True) == 1
    server.tell(scale=1)
    assert server.hear() == {"error": ""}
    assert server.ask()[0] == want
    server.tell(stop=True)
    assert server.hear() == {"error": ""}
    for node in nodes:
        node.expect(ENGINE, 0)
        node.expect(KEEPER, 0)


def test_a_replica_has_ranks_on_nodes_of_their_own_or_none(server, nodes, model):
    assert server.start(model, num_replicas=1) == ""
    want = answers(model)
    assert server.ask() == (want, 0)
    homes = [node for node in nodes if node.pids(KEEPER)]
    assert len(homes) == 2
    assert server.ask(lambda: homes[1].kill(ENGINE)) == (want, 1)
    server.tell(scale=2)  # for which one free node does not suffice
    assert server.hear() == {"error": ""}
    while "2 ranks of an engine need 2 nodes with 1 free CPU each (--threads); the cluster has" not in server.said():
        assert server.ask()[0] == want
    assert [node for node in nodes if node.pids(KEEPER)] == homes
    server.tell(stop=True)
    assert server.hear() == {"error": ""}
    for node in nodes:
        node.expect(ENGINE, 0)
        node.expect(KEEPER, 0)


def test_ranks_are_started_again_and_elsewhere_and_outlive_ray(server, nodes, model):
    want = answers(model)
    assert server.start(model) == ""
    assert server.ask() == (want, 0)

    at = next(node for node in nodes[1:] if node.pids(KEEPER))
    assert server.ask(lambda: at.kill(KEEPER)) == (want, 1)
    assert "its process was killed; it will be started again" in server.said()
    at.expect(KEEPER, 1)

    at = next(node for node in nodes[1:] if node.pids(KEEPER))
    other = next(node for node in nodes[1:] if node is not at)
    assert server.ask(at.kill) == (want, 2)
    assert server.hosts == ["", other.address]
    other.expect(KEEPER, 1)

    nodes[0].kill("gcs_server")
    other.expect("raylet", 0)
    assert server.ask() == (want, 2)
    other.expect(KEEPER, 1)
    assert server.said().count("Ray is gone; serving continues") == 1

    server.tell(stop=True)
    assert server.hear() == {"error": ""}
    other.expect(KEEPER, 0)
