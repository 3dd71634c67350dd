"""Pulls models into the hub's cache, one at a time, in a process of their own.

The state is the server's, so that a page that is loaded again finds it. A pull that ends early keeps its bytes, and the
next pull of that model downloads the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Final, Literal

import msgspec

from moeflow.checkpoint.hub.local_models import hub_cache
from moeflow.checkpoint.hub.model_name import ModelName, no_name, parse_model_name
from moeflow.checkpoint.hub.pull_process import PullOrder, PullReport
from moeflow.server.errors import ApiError

logger = logging.getLogger(__name__)

PullState = Literal["running", "done", "failed", "cancelled"]
_MODULE: Final = "moeflow.checkpoint.hub.pull_process"
_WINDOW_S: Final = 10.0  # of time that the speed is measured over
_END_S: Final = 5.0  # for the process to end by itself


@dataclass(frozen=True, slots=True)
class PullStatus:
    """A pull: the one that runs, or the last one."""

    name: str
    state: PullState
    done_bytes: int = 0  # downloaded now or before
    total_bytes: int = 0  # 0: not known yet
    bytes_per_s: float = 0.0  # over the last seconds
    error: str = ""  # why it failed

    @property
    def left_s(self) -> float | None:
        """The time that is left at this speed; None: not known."""
        left_bytes = self.total_bytes - self.done_bytes
        return left_bytes / self.bytes_per_s if self.bytes_per_s > 0 else None


class Pulls:
    """The pull of a server, if any. To be used in its event loop."""

    def __init__(self, on_pulled: Callable[[ModelName, str], None] = lambda *_: None) -> None:
        """`on_pulled` gets the name and the path of a model that has come."""
        self._on_pulled = on_pulled
        self._status: PullStatus | None = None
        self._working: asyncio.Task[None] | None = None
        self._speed = _Speed()
        self._news = asyncio.Event()  # replaced at each change

    @property
    def status(self) -> PullStatus | None:
        """The pull that runs, else the last one; None: there was none."""
        return self._status

    def begin(self, name: ModelName) -> PullStatus:
        """Begin a pull, or find it running. Raises: ApiError 409 if another one runs."""
        running = self._status if self._working is not None else None
        if running is not None and running.name != str(name):
            message = f"{running.name} is being pulled, and one model is pulled at a time: wait for it, or cancel it"
            raise ApiError(409, "pull_running", message)
        if running is not None:
            return running
        self._speed = _Speed()
        status = PullStatus(str(name), "running")
        self._show(status)
        self._working = asyncio.create_task(self._work(name))
        return status

    async def cancel(self) -> PullStatus | None:
        """End the pull that runs, if any; return when it has ended. Its bytes stay."""
        if (working := self._working) is not None:
            working.cancel()
            await asyncio.wait((working,))
            if self._working is working:  # it had not even begun
                self._end("cancelled")
        return self._status

    async def changes(self) -> AsyncIterator[PullStatus]:
        """Yield the status now and after each change, until the pull has ended."""
        while (status := self._status) is not None:
            news = self._news
            yield status
            if status.state != "running":
                return
            await news.wait()

    async def _work(self, name: ModelName) -> None:
        logger.info("pulling %s", name)
        try:
            path = await self._run(name)
        except asyncio.CancelledError:
            self._end("cancelled")
        except (_PullError, OSError) as error:
            self._end("failed", str(error))
        except Exception:
            logger.exception("the pull of %s failed", name)
            self._end("failed", "the server failed on this pull; its log has the details")
        else:
            self._end("done")
            self._on_pulled(name, path)

    def _end(self, state: PullState, error: str = "") -> None:
        assert self._status is not None, "it was begun"
        self._working = None
        self._show(replace(self._status, state=state, bytes_per_s=0.0, error=error))
        log = logger.error if state == "failed" else logger.info
        log("pull of %s: %s%s", self._status.name, state, f" ({error})" if error else "")

    async def _run(self, name: ModelName) -> str:
        """Run the process to its end; return the model's path. Raises: _PullError, OSError."""
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", _MODULE), stdin=pipe, stdout=pipe, start_new_session=True
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            order = PullOrder(str(name), str(hub_cache()))
            process.stdin.write(msgspec.json.encode(order) + b"\n")
            path = ""
            async for line in process.stdout:
                path = self._take(msgspec.json.decode(line, type=PullReport)) or path
            if not path:
                raise _PullError("its process ended early; the server's log has the details")
            return path
        finally:
            process.stdin.close()  # ends the process
            await asyncio.shield(_ended(process))

    def _take(self, report: PullReport) -> str:
        """Show what the process reports; return the path at the end. Raises: _PullError."""
        if report.error:
            raise _PullError(report.error)
        if not report.path and self._status is not None:
            rate = self._speed.note(report.done_bytes)
            done, total = report.done_bytes, report.total_bytes
            self._show(replace(self._status, done_bytes=done, total_bytes=total, bytes_per_s=rate))
        return report.path

    def _show(self, status: PullStatus) -> None:
        self._status = status
        self._news.set()
        self._news = asyncio.Event()


class _PullError(Exception):
    """Why a pull failed, for people."""


class _Speed:
    """Bytes per second over the last seconds. Bytes that were there before do not count."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, int]] = deque()

    def note(self, done_bytes: int) -> float:
        """Take progress; return the speed, 0 until it can be measured."""
        now_s = time.monotonic()
        self._readings.append((now_s, done_bytes))
        while now_s - self._readings[0][0] > _WINDOW_S:
            self._readings.popleft()
        first_s, first_bytes = self._readings[0]
        return max(done_bytes - first_bytes, 0) / (now_s - first_s) if now_s > first_s else 0.0


def require_model_name(text: str, param: str = "model") -> ModelName:
    """Return what the name of a model on a hub says. Raises: ApiError 400."""
    name = parse_model_name(text)
    if name is None:
        raise ApiError(400, "invalid_value", no_name(text), param=param)
    return name


async def _ended(process: asyncio.subprocess.Process) -> None:
    """Return when a process has ended, which is made to end if it takes long."""
    try:
        async with asyncio.timeout(_END_S):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
