"""Streams of a server and small requests beside them, with the answers of calm times to compare with."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx

from moeflow.core.stream_lines import async_stream_lines

Body = dict[str, Any]
MAX_WAIT_S = 300.0  # for the next line of a stream: some wait for a place while an engine restarts
_CONNECT_S = 10.0
_WORDS = ("the", "river", "stone", "quick", "light", "under", "seven", "green", "morning", "window", "engine", "answer")
_KINDS: tuple[Body, ...] = (
    {"temperature": 0},
    {"temperature": 0.9, "seed": 5},
    {"temperature": 0, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"temperature": 1.0, "seed": 9, "top_p": 0.9, "top_k": 40, "logprobs": 3},
    {"temperature": 0.8, "seed": 2, "n": 2},
    {"temperature": 0.7, "seed": 3, "stop": ["zzqq"]},
)
_STREAMED: Body = {"stream": True, "stream_options": {"include_usage": True}}


@dataclass(slots=True)
class Stream:
    """One streamed answer, and the times of its events."""

    texts: dict[int, str] = field(default_factory=dict)  # by choice
    tokens: dict[int, list[str]] = field(default_factory=dict)  # with log-probabilities, where they were asked for
    reasons: dict[int, str] = field(default_factory=dict)  # of the end
    num_tokens: int = 0  # as the server reports
    times_s: list[float] = field(default_factory=list)
    refusal: httpx.Response | None = None
    error: str = ""  # why it ended early
    is_over: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether the server has ended it in order."""
        return self.is_over and self.refusal is None and not self.error

    def longest_pause(self, begin_s: float, end_s: float) -> float:
        """Return the longest pause between two events that overlaps with this time; 0: there is none."""
        pairs = pairwise(self.times_s)
        return max((after - before for before, after in pairs if before < end_s and after > begin_s), default=0.0)

    def difference(self, calm: Stream) -> str:
        """Return the difference from an undisturbed stream; empty: they are equal."""
        if self.error:
            return self.error
        for index, text in calm.texts.items():
            if (found := self.texts.get(index, "")) != text:
                return f"choice {index} {_difference(found, text)}"
        if self.reasons != calm.reasons:
            return f"finish_reason {self.reasons} instead of {calm.reasons}"
        if self.tokens != calm.tokens:
            return "other tokens or log-probabilities"
        if self.num_tokens != calm.num_tokens:
            return f"{self.num_tokens} tokens instead of {calm.num_tokens}"
        return "" if self.texts.keys() == calm.texts.keys() else "another number of choices"

    def take(self, event: Body) -> None:
        """Note an event."""
        self.times_s.append(time.monotonic())
        if "error" in event:
            self.error = str(event["error"].get("message", event["error"]))
        if event.get("usage"):
            self.num_tokens = event["usage"]["completion_tokens"]
        for choice in event.get("choices", ()):
            index = choice["index"]
            self.texts[index] = self.texts.get(index, "") + choice["text"]
            if logprobs := choice.get("logprobs"):
                pairs = zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)
                self.tokens.setdefault(index, []).extend(f"{token} {value}" for token, value in pairs)
            if choice["finish_reason"] is not None:
                self.reasons[index] = choice["finish_reason"]


def _difference(found: str, wanted: str) -> str:
    same = next((at for at, (one, other) in enumerate(zip(found, wanted, strict=False)) if one != other), None)
    if same is None:
        return f"has {len(found)} characters instead of {len(wanted)}"
    return f"differs at character {same}: {found[same : same + 20]!r} instead of {wanted[same : same + 20]!r}"


def connect(url: str, api_key: str | None = None) -> httpx.AsyncClient:
    """Return a client that opens a connection for each request: the server closes idle ones, maybe as they are used."""
    return httpx.AsyncClient(
        base_url=url,
        headers={b"Authorization": f"Bearer {api_key}".encode()} if api_key else {},
        timeout=httpx.Timeout(MAX_WAIT_S, connect=_CONNECT_S),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        trust_env=False,  # a proxy from the environment would take the traffic elsewhere
    )


def make_bodies(number: int, num_tokens: int, seed: int = 7) -> list[Body]:
    """Make requests of all kinds: greedy, sampled, penalties, log-probabilities, several completions, stop strings."""
    rng = random.Random(seed)
    bodies = []
    for index in range(number):
        prompt = " ".join(rng.choice(_WORDS) for _ in range(rng.randrange(4, 60)))
        kind = _KINDS[index % len(_KINDS)]
        body = {"prompt": prompt, "max_tokens": num_tokens // kind.get("n", 1), "ignore_eos": True, **kind}
        bodies.append(body | ({"min_tokens": num_tokens // 2} if "stop" in kind else {}))
    return bodies


async def read_stream(client: httpx.AsyncClient, body: Body, found: Stream) -> None:
    """Send a request and read its stream to the end, also to an early one."""
    try:
        async with client.stream("POST", "/v1/completions", json=body | _STREAMED) as response:
            if response.is_error:
                await response.aread()
                found.refusal = response
                return
            is_done = False
            async for line in async_stream_lines(response.aiter_text()):
                is_done |= line == "data: [DONE]"
                if line.startswith("data: {"):
                    found.take(json.loads(line.removeprefix("data: ")))
            if not is_done and not found.error:
                found.error = "the stream ended without [DONE]"
    except httpx.HTTPError as error:
        found.error = f"{type(error).__name__} {error}".rstrip()
    finally:
        found.is_over = True


async def stream_all(client: httpx.AsyncClient, bodies: Sequence[Body], streams: Sequence[Stream]) -> None:
    """Run all requests at once."""
    await asyncio.gather(*(read_stream(client, *each) for each in zip(bodies, streams, strict=True)))


async def repeat(client: httpx.AsyncClient, body: Body, over: asyncio.Event, streams: list[Stream]) -> None:
    """Send a request again and again until it is over; a refused one waits before it comes again."""
    while not over.is_set():
        streams.append(Stream())
        await read_stream(client, body, streams[-1])
        if not streams[-1].is_complete:
            await asyncio.sleep(_pause_s(streams[-1].refusal))


def _pause_s(refusal: httpx.Response | None) -> float:
    return 0.2 if refusal is None else min(float(refusal.headers.get("Retry-After", 1)), 1.0)


def is_proper_refusal(response: httpx.Response) -> bool:
    """Whether a client may take this answer as "come again later"."""
    return response.status_code in (429, 503) and "Retry-After" in response.headers


_PROBES: tuple[tuple[str, Body], ...] = (
    ("/v1/completions", {"prompt": "the stone", "max_tokens": 4, "temperature": 0}),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "the river"}], "max_tokens": 4, "temperature": 0},
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "yes or no"}],
            "max_tokens": 8,
            "temperature": 0,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "word", "schema": {"enum": ["yes", "no"]}, "strict": True},
            },
        },
    ),
)
_PROBE_PAUSE_S = 0.2


@dataclass(slots=True)
class Probes:
    """Small requests of several kinds, one after the other, as they need other helpers of the server."""

    wanted: list[tuple[str, Body, Any]] = field(default_factory=list)  # with their answers in calm times
    num_right: int = 0
    num_refused: int = 0
    problems: list[str] = field(default_factory=list)

    async def learn(self, client: httpx.AsyncClient) -> None:
        """Take the answers of calm times; kinds that the model does not support are left out."""
        for path, body in _PROBES:
            response = await client.post(path, json=body)
            if response.is_success:
                self.wanted.append((path, body, response.json()["choices"]))

    async def follow(self, client: httpx.AsyncClient, over: asyncio.Event) -> None:
        """Compare answers until it is over."""
        async for path, body, wanted in self._turns(over):
            try:
                response = await client.post(path, json=body)
            except httpx.HTTPError as error:
                self.problems.append(f"{path}: {type(error).__name__} {error}".rstrip())
                continue
            if is_proper_refusal(response):
                self.num_refused += 1
            elif response.is_error:
                self.problems.append(f"{path}: {response.status_code} {response.text[:200]}")
            elif response.json()["choices"] != wanted:
                self.problems.append(f"{path}: another answer than before")
            else:
                self.num_right += 1

    async def _turns(self, over: asyncio.Event) -> AsyncIterator[tuple[str, Body, Any]]:
        while not over.is_set():
            for each in self.wanted:
                yield each
                await asyncio.sleep(_PROBE_PAUSE_S)
