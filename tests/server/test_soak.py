"""Many streaming clients at once; a third hang up: nothing leaks, no other answer changes."""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.packed import pack_beside
from tests.server.live_server import complaints
from tests.tiny_mixtral import write_tiny_mixtral


@dataclass(frozen=True)
class Job:
    prompt: list[int]
    max_tokens: int
    leaves_after: int | None  # chunks; None: stays to the end

    @property
    def body(self) -> dict[str, object]:
        return {"prompt": self.prompt, "max_tokens": self.max_tokens, "temperature": 0, "ignore_eos": True}


def make_jobs(num_clients: int, *, vocab_size: int, longest_prompt: int, longest_answer: int) -> list[Job]:
    rng = random.Random(11)
    shared = [rng.randrange(3, vocab_size) for _ in range(longest_prompt // 2)]
    jobs = []
    for index in range(num_clients):
        own = [rng.randrange(3, vocab_size) for _ in range(rng.randrange(1, longest_prompt // 2))]
        max_tokens = rng.randrange(2, longest_answer)
        leaves = rng.randrange(0, max_tokens) if index % 3 == 0 else None
        if index % 6 == 0:  # at the beginning of a long answer; its rest is mostly not there yet
            max_tokens, leaves = longest_answer, 1
        jobs.append(Job(shared[: rng.choice([0, 17, len(shared)])] + own, max_tokens, leaves))
    return jobs


async def stream(client: httpx.AsyncClient, job: Job) -> str | None:
    """Return the whole answer, or None if this client left early."""
    await asyncio.sleep(random.Random(repr(job)).random() * 0.3)
    text, chunks = "", 0
    async with client.stream("POST", "/v1/completions", json={**job.body, "stream": True}) as response:
        assert response.status_code == 200
        if job.leaves_after == 0:
            return None
        async for line in response.aiter_lines():
            if line in ("", "data: [DONE]"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            text += "".join(choice["text"] for choice in event["choices"])
            chunks += 1
            if chunks == job.leaves_after:
                return None
    return text


async def wait_until_idle(client: httpx.AsyncClient) -> dict[str, int]:
    for _ in range(200):
        stats = (await client.get("/stats")).json()
        if not (stats["num_running"] or stats["num_waiting"] or stats["kv_blocks_used"]):
            return stats
        await asyncio.sleep(0.1)
    pytest.fail(f"requests or blocks leaked: {stats}")


async def soak(url: str, jobs: list[Job], rounds: int) -> dict[str, int]:
    """Run the clients, compare with solo runs, and return the server's statistics."""
    limits = httpx.Limits(max_connections=len(jobs))
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        for number in range(10 * rounds):
            answers = await asyncio.gather(*(stream(client, job) for job in jobs))
            stats = await wait_until_idle(client)
            # On a busy machine, a tiny model may have written all answers before any client leaves: then retry.
            if number + 1 >= rounds and stats["requests_cancelled_total"] > 0:
                break
        survivors = [(job, answer) for job, answer in zip(jobs, answers, strict=True) if job.leaves_after is None]
        assert len(survivors) == len(jobs) - len(range(0, len(jobs), 3))
        assert stats["requests_cancelled_total"] > 0
        for job, answer in survivors:
            alone = (await client.post("/v1/completions", json=job.body)).json()
            assert alone["usage"]["completion_tokens"] == job.max_tokens
            assert answer == alone["choices"][0]["text"]
    return stats


@contextmanager
def serving(model: str, *options: str) -> Iterator[str]:
    """Run the real command and yield its address; it must end in order on SIGTERM, with nothing to complain of."""
    command = [sys.executable, "-m", "moeflow.cli.main", "serve", model, "--port", "0", *options]
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            assert process.stdout is not None
            address = re.search(r"http://\S+", process.stdout.readline())
            assert address is not None
            yield address[0]
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
        errors.seek(0)
        assert complaints(errors.read().decode()) == ""


@pytest.mark.slow
def test_clients_that_hang_up_leave_nothing_behind(tmp_path: Path):
    write_tiny_mixtral(tmp_path)
    pack_beside(tmp_path)
    jobs = make_jobs(32, vocab_size=258, longest_prompt=200, longest_answer=120)
    # 24 blocks, a longest request needs 20: they run out as soon as any two long ones overlap, however fast they go
    memory = ("--dtype", "float32", "--kv-dtype", "float32", "--kv-cache", "100kB", "--max-model-len", "320")
    options = ("--max-num-seqs", "12", "--threads", "1", "--cache-dir", str(tmp_path), *memory)
    with serving(str(tmp_path), *options) as url:
        stats = asyncio.run(soak(url, jobs, rounds=3))
    assert stats["kv_blocks_total"] == 24
    assert stats["preemptions_total"] > 0


@pytest.mark.weights
@pytest.mark.slow
@pytest.mark.thorough  # the tiny model above has more clients, and has to wait for memory
def test_the_built_in_model_under_the_same_treatment(builtin_model: Path):
    jobs = make_jobs(9, vocab_size=49152, longest_prompt=80, longest_answer=24)
    with serving(str(builtin_model), "--quantize", "int8", "--threads", "1") as url:
        asyncio.run(soak(url, jobs, rounds=1))
