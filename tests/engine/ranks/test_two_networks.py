"""Ranks in two network namespaces, as on two machines: joined over a cable that can be pulled."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moeflow.kernels.cpu import extension
from moeflow.parallel.tcp.cluster_token import default_token_file, ensure_token
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings
from tests.engine.ranks.joiners import joined
from tests.engine.streamed_runs import run
from tests.tiny_mixtral import write_tiny_mixtral

HEAD, OTHER, PORT = "10.213.77.1", "10.213.77.2", 9200
PROMPTS = [[5, 9, 200, 31, 7], list(range(2, 250)), [100]]
FIRST_RANK = """
import dataclasses, json, pathlib, sys
from moeflow.core.errors import GroupError
from moeflow.engine.engine import Engine
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings
from tests.engine.streamed_runs import answers
model, cache_dir, address, num_ranks, prompts = sys.argv[1:]
settings = Settings(
    model=model, cache_dir=pathlib.Path(cache_dir), kv_cache_bytes=2**22, num_threads=1, listen_ranks=address
)
config = resolve(dataclasses.replace(settings, num_ranks=int(num_ranks))).config
engine = Engine.load(config)
try:
    while sys.stdin.readline():
        print(json.dumps(answers(engine, json.loads(prompts))[0]), flush=True)
except GroupError as error:
    print(json.dumps(str(error)), flush=True)
finally:
    engine.close()
"""


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
def first_rank(namespace: str, model: str, cache_dir: Path, num_ranks: int) -> Iterator[subprocess.Popen[str]]:
    arguments = (model, str(cache_dir), f"{HEAD}:{PORT}", str(num_ranks), json.dumps(PROMPTS))
    command = ["ip", "netns", "exec", namespace, sys.executable, "-c", FIRST_RANK, *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        try:
            yield process
        finally:
            process.kill()


def ask(process: subprocess.Popen[str]):
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


@pytest.mark.slow
@pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
def test_ranks_on_two_networks_answer_as_one_process_and_survive_a_pulled_cable(networks, tmp_path):
    first, second = networks
    model = str(tmp_path / "tiny")
    write_tiny_mixtral(Path(model), num_local_experts=5)
    ensure_token(default_token_file(tmp_path))
    want = run(resolve(Settings(model=model, kv_cache_bytes=2**22, num_threads=1)).config, PROMPTS)
    with joined(f"{HEAD}:{PORT}", tmp_path, number=2, prefix=("ip", "netns", "exec", second)) as joiners:
        with first_rank(first, model, tmp_path, num_ranks=3) as head:
            assert ask(head) == want
            pull(first, "down")
            assert f"({OTHER}:" in (error := ask(head))
            assert "the network between is cut" in error
        pull(first, "up")
        for joiner in joiners:
            joiner.expect("waiting to join again")
        with first_rank(first, model, tmp_path, num_ranks=3) as head:
            assert ask(head) == want
