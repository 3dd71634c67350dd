"""`moeflow serve --model A --model B` as its users start it: real engines come and go within one budget."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
import torch

from tests.engine.fakes import byte_level_tokenizer
from tests.packed import pack_beside
from tests.server.live_server import complaints, eventually
from tests.tiny_mixtral import write_tiny_mixtral

pytestmark = pytest.mark.slow

PROMPT = [5, 6, 7]
NUM_TOKENS = 12
BODY = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
FOR_ONE, FOR_BOTH = "700MiB", "3GiB"  # the plan of a server with one such model has about 440 MiB
NAMES = ("first", "second", "damaged")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, str]:
    """What transformers' own models say, by name."""
    found, tokenizer = {}, byte_level_tokenizer()
    for number, name in enumerate(NAMES):
        model = write_tiny_mixtral(folder / name, seed=number)
        model.generation_config.eos_token_id = None
        ids = torch.tensor([PROMPT])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0
        )
        found[name] = tokenizer.decode(output[0, len(PROMPT) :].tolist())
        if name != "damaged":
            pack_beside(folder / name, folder / "cache")
    (weights,) = (folder / "damaged").glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert found["first"] != found["second"]
    return found


class Servers:
    """A server of several models, started from the command line."""

    def __init__(self, folder: Path, memory: str) -> None:
        named = [part for name in NAMES[1:] for part in ("--model", f"{folder / name}")]
        command = [sys.executable, "-m", "moeflow", "serve", *named, "--model", f"1st={folder / 'first'}"]
        options = ["--memory", memory, "--port", "0", "--threads", "1", "--cache-dir", str(folder / "cache")]
        self.process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        line = self.process.stdout.readline()
        match = re.fullmatch(r"moeflow serves second, damaged, 1st at (http://127\.0\.0\.1:\d+)\n", line)
        if match is None:
            self.process.kill()  # or its stderr would have no end
            pytest.fail(f"{line!r}, {self.process.stderr.read()}")
        self.url = match[1]

    def ask(self, model: str, **more) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/completions", json=BODY | {"model": model} | more, timeout=60)

    def in_background(self, model: str) -> tuple[threading.Thread, list[httpx.Response]]:
        """Stream a long answer, and return once it has begun."""
        answers: list[httpx.Response] = []
        begun = threading.Event()

        def read() -> None:
            body = BODY | {"model": model, "max_tokens": 400, "stream": True}
            with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=60) as response:
                for _ in response.iter_lines():
                    begun.set()
            answers.append(response)

        thread = threading.Thread(target=read)
        thread.start()
        assert begun.wait(60)
        return thread, answers

    def status(self) -> dict[str, str]:
        return {it["id"]: it["status"] for it in httpx.get(f"{self.url}/v1/models").json()["data"]}

    def engines(self) -> list[psutil.Process]:
        children = psutil.Process(self.process.pid).children()
        return [child for child in children if "moeflow.processes.main" in child.cmdline()]

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


@pytest.fixture
def small(folder: Path, expected: dict[str, str]) -> Iterator[Servers]:
    """Servers with memory for a single model."""
    yield from running(Servers(folder, FOR_ONE))


@pytest.fixture
def roomy(folder: Path, expected: dict[str, str]) -> Iterator[Servers]:
    """Servers with memory for all."""
    yield from running(Servers(folder, FOR_BOTH))


def running(server: Servers) -> Iterator[Servers]:
    try:
        yield server
    finally:
        server.process.kill()
        server.process.communicate()


def test_models_alternate_in_memory_for_one_and_say_what_they_say_alone(small, expected):
    assert small.engines() == []
    assert text_of(small.ask("1st")) == expected["first"]
    (engine,) = small.engines()
    assert small.status() == {"second": "unloaded", "damaged": "unloaded", "1st": "ready"}
    assert text_of(small.ask("second")) == expected["second"]
    assert small.status() == {"second": "ready", "damaged": "unloaded", "1st": "unloaded"}
    assert not engine.is_running()
    assert len(small.engines()) == 1
    with ThreadPoolExecutor() as threads:
        texts = list(threads.map(lambda name: text_of(small.ask(name)), ["1st", "second"] * 2))
    assert texts == [expected["first"], expected["second"]] * 2
    engines = small.engines()
    assert small.end() == 0
    assert not any(engine.is_running() for engine in engines)


def test_a_damaged_model_is_an_error_and_models_that_fit_stay_side_by_side(roomy, expected, folder):
    assert text_of(roomy.ask("1st")) == expected["first"]
    failed = roomy.ask("damaged")
    assert (failed.status_code, failed.json()["error"]["code"]) == (500, "model_load_failed")
    assert str(folder) not in failed.text
    assert "The model 'damaged' cannot be loaded: " in failed.text
    assert text_of(roomy.ask("second")) == expected["second"]
    assert roomy.status() == {"second": "ready", "damaged": "unloaded", "1st": "ready"}
    stream = httpx.post(f"{roomy.url}/v1/completions", json=BODY | {"model": "1st", "stream": True}, timeout=60)
    assert stream.text.endswith("data: [DONE]\n\n")
    health = httpx.get(f"{roomy.url}/health").json()
    assert (health["status"], health["num_replicas_ready"]) == ("ready", 2)
    engines = roomy.engines()
    assert len(engines) == 2
    thread, answers = roomy.in_background("second")
    assert roomy.end() == 0  # both end, after the request that runs
    thread.join()
    assert answers[0].status_code == 200
    assert eventually(lambda: not any(engine.is_running() for engine in engines))
    assert "model damaged cannot be loaded" in complaints(roomy.process.stderr.read())
