"""From nothing to an answer over HTTP alone: a real server of several models pulls one from a hub, and loads it."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import httpx
import psutil
import pytest
import torch

from tests.checkpoint.hub.hub_server import Hub, running_hub
from tests.engine.fakes import byte_level_tokenizer
from tests.packed import know_this_machine
from tests.patience import PATIENCE_S
from tests.server.live_server import eventually
from tests.tiny_mixtral import write_tiny_mixtral

pytestmark = pytest.mark.slow

PROMPT = [5, 6, 7]
NUM_TOKENS = 12
BODY = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
REPO, BIG = "tiny/Mixtral", "big/Model-GGUF:Q4_K_M"


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running_hub() as hub:
        hub.add("big/Model-GGUF", {"Model-Q4_K_M.gguf": random.Random(0).randbytes(4_000_000)})
        yield hub


@pytest.fixture
def expected(hub, tmp_path) -> str:
    """What transformers' own model says; it is on the hub then."""
    model = write_tiny_mixtral(tmp_path / "pulled", seed=2)
    model.generation_config.eos_token_id = None
    ids = torch.tensor([PROMPT])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False)
    hub.add_folder(REPO, tmp_path / "pulled")
    return byte_level_tokenizer().decode(output[0, len(PROMPT) :].tolist())


@pytest.fixture
def server(hub, tmp_path) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    for name in ("one", "two"):
        write_tiny_mixtral(tmp_path / name)
    know_this_machine(tmp_path / "cache")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "MOEFLOW_API_KEY": "k"}
    command = [sys.executable, "-m", "moeflow", "serve", "--model", f"{tmp_path / 'one'}", "--model"]
    options = ["--memory", "3GiB", "--port", "0", "--threads", "1", "--cache-dir", str(tmp_path / "cache")]
    process = subprocess.Popen(
        [*command, f"{tmp_path / 'two'}", *options], env=clean | own, stdout=subprocess.PIPE, text=True
    )
    try:
        match = re.search(r"http://127\.0\.0\.1:\d+", process.stdout.readline())
        assert match is not None
        with httpx.Client(base_url=match[0], headers={"x-api-key": "k"}, timeout=60) as http:
            yield process, http
    finally:
        process.kill()
        process.communicate()


def pull(http: httpx.Client, model: str, is_far: Callable[[dict], bool]) -> dict:
    assert http.post("/models/pull", json={"model": model}).status_code == 200
    found: list[dict] = []

    def look() -> bool:
        found.append(http.get("/models/pull").json()["pull"])
        return is_far(found[-1])

    assert eventually(look, PATIENCE_S)
    return found[-1]


def test_a_pulled_model_answers_as_it_does_elsewhere(server, expected):
    process, http = server
    assert pull(http, REPO, lambda it: it["state"] != "running")["state"] == "done"
    assert REPO in [it["id"] for it in http.get("/v1/models").json()["data"]]
    answer = http.post("/v1/completions", json=BODY | {"model": REPO})
    assert answer.json()["choices"][0]["text"] == expected
    assert http.post("/models/unload", json={"model": REPO}).json() == {"model": REPO, "status": "unloaded"}
    lines = http.get("/stats/log").json()["lines"]
    assert f"model {REPO} is added, and loaded when it is asked for" in [it["message"] for it in lines]
    process.terminate()
    assert process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("end", [subprocess.Popen.terminate, subprocess.Popen.kill], ids=["SIGTERM", "SIGKILL"])
def test_no_pull_outlives_its_server(server, hub, end):
    process, http = server
    hub.chunk_bytes, hub.wait_s = 50_000, 0.1
    pull(http, BIG, lambda it: it["done_bytes"] > 0)
    children = psutil.Process(process.pid).children()
    hub.wait_s = 60.0
    done_bytes = -1
    while done_bytes != (done_bytes := http.get("/models/pull").json()["pull"]["done_bytes"]):
        time.sleep(0.4)  # until nothing comes: else the next report would end it by a broken pipe
    (pulling,) = [it for it in children if "moeflow.checkpoint.hub.pull_process" in it.cmdline()]
    end(process)
    assert process.wait(PATIENCE_S) == (0 if end is subprocess.Popen.terminate else -9)
    assert eventually(lambda: not pulling.is_running() or pulling.status() == psutil.STATUS_ZOMBIE)
