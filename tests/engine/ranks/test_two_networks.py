"""Ranks in two network namespaces, as on two machines: joined over a cable that can be pulled."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moeflow.kernels.cpu import extension
from moeflow.parallel.tcp.cluster_token import default_token_file, ensure_token
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings
from tests.engine.ranks.joiners import joined
from tests.engine.ranks.ray_server import asked
from tests.processes.test_process import in_this_process
from tests.tiny_mixtral import write_tiny_mixtral

HEAD, OTHER, PORT = "10.213.77.1", "10.213.77.2", 9200
DOWN_S = 12.0  # longer than any connection survives
PROMPTS = [[5, 9, 200, 31, 7], list(range(2, 250)), [100]]


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def pull(namespace: str, direction: str) -> None:
    ip("-n", namespace, "link", "set", "cable", direction)


@pytest.fixture
def networks() -> Iterator[tuple[str, str]]:
    """Two namespaces, with a cable between them."""
    names = first, second = f"moeflow-{os.getpid()}-a", f"moeflow-{os.getpid()}-b"
    with contextlib.ExitStack() as undo:
        try:
            for name in names:
                ip("netns", "add", name)
                undo.callback(ip, "netns", "delete", name)
                ip("-n", name, "link", "set", "lo", "up")
            ip("link", "add", "cable", "netns", first, "type", "veth", "peer", "name", "cable", "netns", second)
            for name, address in ((first, HEAD), (second, OTHER)):
                ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
                pull(name, "up")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield names


@contextlib.contextmanager
def server(namespace: str) -> Iterator[Callable[..., dict]]:
    """A server in a namespace; yield a function that gives it a command and returns its next line."""
    command = ["ip", "netns", "exec", namespace, sys.executable, "-m", "tests.engine.ranks.ray_server"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def tell(**what) -> dict:
            assert process.stdin is not None
            assert process.stdout is not None
            if what:
                process.stdin.write(json.dumps(what) + "\n")
                process.stdin.flush()
            return json.loads(process.stdout.readline())

        try:
            yield tell
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.thorough  # test_joined_ranks.py cuts a link, test_ray_ranks.py runs ranks on three networks
@pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
def test_ranks_on_two_networks_answer_as_one_process_and_survive_a_pulled_cable(networks, tmp_path):
    first, second = networks
    model = str(tmp_path / "tiny")
    write_tiny_mixtral(Path(model), num_local_experts=5, max_position_embeddings=1024)
    ensure_token(default_token_file(tmp_path))
    settings = {"model": model, "kv_cache_bytes": 2**22, "num_threads": 1}
    want = in_this_process(resolve(Settings(**settings)).config, asked(PROMPTS))
    settings |= {"cache_dir": str(tmp_path), "listen_ranks": f"{HEAD}:{PORT}", "num_ranks": 3}
    with (
        joined(f"{HEAD}:{PORT}", tmp_path, number=2, prefix=("ip", "netns", "exec", second)),
        server(first) as tell,
    ):
        assert tell(start=settings, patience_s=1.0) == {"error": ""}
        assert tell(ask=PROMPTS) == {"begun": True}
        pull(first, "down")
        threading.Timer(DOWN_S, pull, (first, "up")).start()
        found = tell()
        assert (found["tokens"], found["restarts"]) == (want, 1)
        assert tell(stop=True) == {"error": ""}
