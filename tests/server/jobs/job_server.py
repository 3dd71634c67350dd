"""A server as far as jobs know of it: an engine that plays, a data folder, and a clock that can be set."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from moeflow.engine.generator import Generator
from moeflow.server.api.schema.batch import BatchObject
from moeflow.server.config import ServerConfig
from moeflow.server.jobs.data_folder import Jobs
from moeflow.server.jobs.job_clock import JobClock
from moeflow.server.service import Service
from tests.patience import PATIENCE_S
from tests.server.fake_client import FakeClient
from tests.server.jobs.requests import CHAT


class Clock(JobClock):
    """It can be set: how much time has passed, and how far the wall clock alone is ahead."""

    ahead_s = 0.0
    wall_ahead_s = 0.0

    def __init__(self) -> None:
        super().__init__(
            lambda: time.time() + self.ahead_s + self.wall_ahead_s, lambda: time.monotonic() + self.ahead_s
        )

    def restart(self) -> None:
        """As a new process reads it."""
        self.__init__()


class Server:
    """One start of a server on a folder, as far as jobs know of it."""

    def __init__(self, folder: Path, tokenizer, clock: Clock) -> None:
        self.engine = FakeClient(tokenizer)
        service = Service(ServerConfig())
        service.attach(Generator(self.engine, tokenizer))
        self.jobs = Jobs(folder, service, clock)

    def begin(self, *lines: bytes) -> BatchObject:
        with self.jobs.files.incoming() as incoming:
            incoming.path.write_bytes(b"\n".join(lines))
            file = self.jobs.files.add(incoming, "in.jsonl", "batch", None)
        return self.jobs.batches.create(
            endpoint=CHAT, model=self.engine.model.name, input_file_id=file.id, metadata=None, output_lifetime_s=None
        )

    async def finish(self) -> None:
        self.jobs.worker.wake()
        async with asyncio.timeout(PATIENCE_S):
            while self.jobs.batches.unfinished():
                await asyncio.sleep(0.001)
        await self.jobs.close()
