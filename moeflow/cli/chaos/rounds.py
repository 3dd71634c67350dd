"""Runs faults under load, one after the other, and judges what clients noticed."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from moeflow.cli.chaos.batch_job import BatchJob, has_batches
from moeflow.cli.chaos.faults import Fault, Scene
from moeflow.cli.chaos.streams import (
    Body,
    Probes,
    Stream,
    connect,
    is_proper_refusal,
    make_bodies,
    repeat,
    stream_all,
)
from moeflow.cli.chaos.watch import HealthWatch
from moeflow.core.errors import EngineError

PATIENCE_S = 300.0  # for anything that must come
_SEEN_S = 10.0  # for the next look at `/health`
_SETTLE_S = 2.0  # of load after a fault that has no end of its own
_LOOK_S = 0.02
_MAX_SHOWN = 3  # problems of each row


@dataclass(slots=True)
class Row:
    """What clients noticed of one fault."""

    fault: str
    target: str = ""
    num_streams: int = 0
    num_equal: int = 0
    num_cut: int = 0  # by the fault itself
    num_refused: int = 0
    num_batch_lines: int = 0
    num_batch_equal: int = 0
    seen_s: float | None = None
    back_s: float | None = None
    longest_pause_s: float = 0.0
    problems: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """Whether nothing was violated."""
        return not self.problems


class Rounds:
    """A load with known answers. Make one, `learn`, then `run` faults."""

    def __init__(self, scene: Scene, url: str, load: Load) -> None:
        """Nothing is sent yet. `url` is the server's; half of the streams go through the scene's proxy."""
        self.scene = scene
        self._load = load
        self._bodies = make_bodies(load.num_streams, load.num_tokens, load.seed)
        self._client = connect(url, load.api_key)
        self._by_proxy = connect(f"http://127.0.0.1:{scene.front.port}", load.api_key)
        self._calm: list[Stream] = []
        self._probes = Probes()
        self._job: BatchJob | None = None
        self._calm_texts: dict[str, str] = {}

    async def __aenter__(self) -> Rounds:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()
        await self._by_proxy.aclose()

    async def learn(self) -> None:
        """Take the answers of calm times. Raises: EngineError if the server does not give them."""
        try:
            self._calm = [Stream() for _ in self._bodies]
            await stream_all(self._client, self._bodies, self._calm)
            failed = next((stream for stream in self._calm if not stream.is_complete), None)
            if failed is not None:
                raise EngineError(f"the server fails without a fault: {failed.error or failed.refusal}")
            await self._probes.learn(self._client)
            if self._load.num_batch_lines and await has_batches(self._client):
                self._job = BatchJob(self._client, self._load.num_batch_lines, self._load.num_tokens // 4 or 1)
                await self._job.begin()
                self._calm_texts = await self._job.texts(PATIENCE_S)
        except httpx.HTTPError as error:
            raise EngineError(f"no server answers: {type(error).__name__} {error}".rstrip()) from error

    async def run(self, fault: Fault, restore: Callable[[], None]) -> Row:
        """Run one fault. `restore` starts machines that have ended."""
        row = Row(fault.name)
        watch, over = HealthWatch(), asyncio.Event()
        probes = Probes(self._probes.wanted)
        streams: list[list[Stream]] = [[] for _ in self._bodies]
        begin_s = time.monotonic()
        try:
            async with self._following(watch):
                await self._must_be_whole(watch)
                if self._job is not None:
                    await self._job.begin()
                async with self._loaded(streams, probes, over):
                    await self._until_streaming(streams)
                    await asyncio.sleep(self.scene.rng.random() * 0.5)
                    begin_s = time.monotonic()
                    await self._disturb(fault, watch, restore, row)
                end_s = time.monotonic()
            await self._judge_batch(row)
            await self._until_idle()
        except (EngineError, httpx.HTTPError) as error:
            row.problems.append(str(error) or type(error).__name__)
            end_s = time.monotonic()
        row.seen_s, row.back_s = watch.seen_after_s(begin_s), watch.back_after_s(begin_s)
        self._judge_streams(fault, streams, row)
        pauses = (stream.longest_pause(begin_s, end_s) for each in streams for stream in each)
        row.longest_pause_s = max(pauses, default=0.0)
        row.num_refused += probes.num_refused
        row.problems += probes.problems
        del row.problems[_MAX_SHOWN:]
        return row

    @contextlib.asynccontextmanager
    async def _following(self, watch: HealthWatch) -> AsyncIterator[None]:
        following = asyncio.create_task(watch.follow(self._client))
        try:
            yield
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    @contextlib.asynccontextmanager
    async def _loaded(self, streams: list[list[Stream]], probes: Probes, over: asyncio.Event) -> AsyncIterator[None]:
        """Send requests while the block runs, and wait until they are answered."""
        clients = (self._client, self._by_proxy)
        tasks = [
            asyncio.create_task(repeat(clients[number % 2], body, over, streams[number]))
            for number, body in enumerate(self._bodies)
        ]
        tasks.append(asyncio.create_task(probes.follow(self._client, over)))
        try:
            yield
            over.set()
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.gather(*tasks)
        except TimeoutError:
            raise EngineError(f"streams have not ended {PATIENCE_S:.0f} s after the fault") from None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _disturb(self, fault: Fault, watch: HealthWatch, restore: Callable[[], None], row: Row) -> None:
        scene = self.scene
        scene.done, begin_s = "", time.monotonic()
        with scene.undo:
            fault.begin(scene)
            row.target = scene.done
            if fault.lasts:
                await asyncio.sleep(self._load.fault_s)
        must_be_seen = fault.seen_from_s is not None and (not fault.lasts or fault.seen_from_s <= self._load.fault_s)
        if must_be_seen and not await watch.until_seen(begin_s, _SEEN_S):
            row.problems.append("/health did not show it")
        restore()
        if not fault.lasts:
            await asyncio.sleep(min(_SETTLE_S, self._load.fault_s))
        await self._must_be_whole(watch)

    async def _must_be_whole(self, watch: HealthWatch) -> None:
        whole = asyncio.create_task(watch.until_whole(PATIENCE_S))
        while not whole.done():
            await asyncio.wait((whole,), timeout=1.0)
            if not self.scene.processes.server.is_running():
                whole.cancel()
                raise EngineError("the server's process has ended")
        if not whole.result():
            raise EngineError(f"not all engines are ready after {PATIENCE_S:.0f} s")

    async def _until_streaming(self, streams: list[list[Stream]]) -> None:
        last_s = time.monotonic() + PATIENCE_S
        while not all(each and each[0].times_s for each in streams):
            if time.monotonic() > last_s:
                raise EngineError(f"a stream has not begun after {PATIENCE_S:.0f} s")
            await asyncio.sleep(_LOOK_S)

    async def _judge_batch(self, row: Row) -> None:
        if self._job is None:
            return
        row.num_batch_lines = self._job.num_lines
        texts = await self._job.texts(PATIENCE_S)
        row.num_batch_equal = sum(texts.get(line) == text for line, text in self._calm_texts.items())
        if row.num_batch_equal != row.num_batch_lines:
            row.problems.append(f"{row.num_batch_equal} of {row.num_batch_lines} lines of the batch job are equal")

    def _judge_streams(self, fault: Fault, streams: list[list[Stream]], row: Row) -> None:
        for number, (calm, found) in enumerate(zip(self._calm, streams, strict=True)):
            for stream in found:
                if stream.refusal is not None and is_proper_refusal(stream.refusal):
                    row.num_refused += 1
                    continue
                row.num_streams += 1
                if stream.refusal is not None:
                    row.problems.append(f"{stream.refusal.status_code} {stream.refusal.text[:200]}")
                elif stream.error and fault.cuts_clients and number % 2:
                    row.num_cut += 1
                elif not stream.is_over:
                    row.problems.append(f"stream {number} has not ended")
                elif difference := stream.difference(calm):
                    row.problems.append(f"stream {number}: {difference}")
                else:
                    row.num_equal += 1

    async def _until_idle(self) -> None:
        """Wait until the server has forgotten all requests. Raises: EngineError if it does not."""
        last_s = time.monotonic() + PATIENCE_S / 5
        while (stats := await self._stats())["num_unfinished"] or stats["kv_blocks_used"]:
            if time.monotonic() > last_s:
                raise EngineError(f"{stats['num_unfinished']} requests, {stats['kv_blocks_used']} KV blocks are left")
            await asyncio.sleep(0.1)

    async def _stats(self) -> dict[str, Any]:
        found: dict[str, Any] = (await self._client.get("/stats")).json()
        return found


@dataclass(frozen=True, slots=True)
class Load:
    """How much is asked of the server, and how long a fault lasts."""

    num_streams: int
    num_tokens: int  # of each stream
    fault_s: float
    num_batch_lines: int = 16
    seed: int = 0
    api_key: str | None = None


def fields(row: Row) -> Body:
    """Return a row for a record."""
    return dataclasses.asdict(row) | {"is_good": row.is_good}
