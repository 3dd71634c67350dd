"""Keeps a server busy, and prints its tokens and seconds as JSON.

    python -m studies.sleeping_engines.workers.client URL STREAMS WARM_UP_S MEASURE_S

Streams follow each other without a pause. The engines count the tokens.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
import urllib.request
from typing import Any
from urllib.parse import urlsplit

LENGTHS = (64, 128)  # tokens of an answer, at least and at most


async def stream_for_ever(host: str, port: int, number: int) -> None:
    """Ask one completion after the other, and read its stream."""
    lengths = random.Random(number)
    while True:
        body = {
            "prompt": f"Story {number}",
            "max_tokens": lengths.randint(*LENGTHS),
            "stream": True,
            "ignore_eos": True,
        }
        reader, writer = await asyncio.open_connection(host, port)
        content = json.dumps(body).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Type: application/json\r\n"
        )
        writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        answer = b""
        while piece := await reader.read(1 << 16):
            answer = (answer + piece)[-100:]
        writer.close()
        if b"[DONE]" not in answer:
            raise ConnectionError(f"a stream broke off: {answer!r}")


def tokens_so_far(url: str) -> int:
    """Return how many tokens the engines have generated."""
    with urllib.request.urlopen(f"{url}/stats", timeout=60) as response:
        found: dict[str, Any] = json.load(response)
    return int(found["generated_tokens_total"])


async def measure(url: str, num_streams: int, warm_up_s: float, measure_s: float) -> dict[str, float]:
    """Return tokens and seconds. All streams run meanwhile."""
    address = urlsplit(url)
    assert address.hostname is not None
    assert address.port is not None
    streams = [stream_for_ever(address.hostname, address.port, number) for number in range(num_streams)]
    running = [asyncio.create_task(stream) for stream in streams]
    await asyncio.wait(running, timeout=warm_up_s)
    begun_s, before = time.monotonic(), await asyncio.to_thread(tokens_so_far, url)
    print("measuring", flush=True)
    await asyncio.wait(running, timeout=measure_s, return_when=asyncio.FIRST_COMPLETED)
    after, end_s = await asyncio.to_thread(tokens_so_far, url), time.monotonic()
    for task in running:
        if task.done():
            task.result()
        task.cancel()
    await asyncio.wait(running)
    return {"tokens": after - before, "seconds": end_s - begun_s}


if __name__ == "__main__":
    url, *numbers = sys.argv[1:]
    print(json.dumps(asyncio.run(measure(url, int(numbers[0]), float(numbers[1]), float(numbers[2])))), flush=True)
