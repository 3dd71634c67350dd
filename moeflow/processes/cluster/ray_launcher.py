"""Processes that Ray starts, seen from the server: asked for before the first engine, kept through all restarts.

A process of its own calls Ray (`ray_cluster.py`), because Ray ends processes that have lost it. While Ray is away,
engines continue with existing ranks. The launcher retries, since only Ray can replace one.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import sys
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final

import msgspec

from moeflow.core.errors import CapacityError, ConfigError, EngineError
from moeflow.core.truncated_repr import truncated
from moeflow.parallel.child_processes import EXIT_GRACE_S
from moeflow.processes.cluster.ray_messages import (
    Connect,
    Connected,
    KeeperRefused,
    LaunchOrder,
    LaunchReport,
    More,
    NodeLost,
    Placed,
    Progress,
    Unplaced,
)

logger = logging.getLogger(__name__)

PLACEMENT_S = 60.0  # for the cluster to have resources for the ranks of an engine that begins here
_FIRST_PAUSE_S: Final = 1.0  # before Ray is looked for again; each pause twice as long as the one before
_MAX_PAUSE_S: Final = 60.0
_MAIN: Final = (
    "from moeflow.processes.cluster.ray_cluster import main; main()"  # so that the actor's module has its name
)

OrderAt = Callable[[str], LaunchOrder]


class RayLauncher:
    """The keepers of a server on a Ray cluster. Make one with `start`, end it with `close`."""

    def __init__(self, address: str, order_at: OrderAt, on_node_lost: Callable[[str], None]) -> None:
        """Nothing is started yet. `order_at` returns the order for this machine's address in the cluster.
        `on_node_lost` gets the address of a node that Ray has lost.
        """
        self._address = address
        self._on_node_lost = on_node_lost
        self._order_at = order_at
        self._process: asyncio.subprocess.Process | None = None
        self._has_order = False  # that process
        self._words: deque[str] = deque(maxlen=1)  # the last line that Ray has printed
        self._listening: asyncio.Task[None] | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._num_needed = 1  # so many refusals leave no engine
        self._refused: set[int] = set()  # engines, or a rank
        self._refusal: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @classmethod
    async def start(cls, address: str, order_at: OrderAt, on_node_lost: Callable[[str], None]) -> RayLauncher:
        """Have Ray start keepers, and return once each rank has a node, or at once if they are for engines.

        Raises: ConfigError if there is no Ray, CapacityError if its cluster has too few nodes, EngineError if it fails.
        """
        if importlib.util.find_spec("ray") is None:
            raise ConfigError("a Ray cluster (--ray-address) needs Ray: run `pip install 'moeflow[ray]'`")
        launcher = cls(address, order_at, on_node_lost)
        try:
            await launcher._launch()
        except BaseException:
            await launcher.close()
            raise
        launcher._keeping = asyncio.create_task(launcher._keep())
        return launcher

    async def unless_refused(self, start: Coroutine[Any, Any, None]) -> None:
        """Await the start of an engine. Raises: as that; ConfigError if no node can have an engine, or a rank."""
        starting = asyncio.create_task(start)
        try:
            await asyncio.wait((starting, self._refusal), return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                raise ConfigError(self._refusal.result())
            starting.result()
        finally:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)

    def start_more(self, number: int) -> None:
        """Have Ray start this number of further engines. While Ray is away, nothing happens: the next order has all."""
        if number and self._has_order:
            assert self._process is not None
            assert self._process.stdin is not None
            self._process.stdin.write(msgspec.json.encode(More(number)) + b"\n")

    async def close(self) -> None:
        """End the keepers, and the process that speaks to Ray. Blocks: for a moment, some seconds if it hangs."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        await self._end_process()

    async def _end_process(self) -> None:
        if (process := self._process) is None:
            return
        self._has_order = False
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), EXIT_GRACE_S)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        if self._listening is not None:
            await self._listening

    async def _launch(self) -> None:
        """Start the process, and return once Ray has found places. Raises: as `start`."""
        command = (sys.executable, "-c", _MAIN)
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )
        self._has_order = False
        self._listening = asyncio.create_task(self._listen(self._process))
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(Connect(self._address)) + b"\n")
        while (report := await self._next_report(self._process)) is not None:
            if isinstance(report, Connected):
                order = self._order_at(report.own_address)
                self._num_needed = 1 if order.has_first_here else order.num_engines
                self._process.stdin.write(msgspec.json.encode(order) + b"\n")
                self._has_order = True
            elif isinstance(report, Placed):
                if report.nodes:
                    logger.warning("Ray starts ranks on %s", ", ".join(report.nodes))
                return
            elif isinstance(report, Unplaced):
                raise (CapacityError if report.lacks_nodes else ConfigError)(report.reason)
            self._take(report)
        raise EngineError(f"Ray failed: {self._last_words()}")

    async def _keep(self) -> None:
        """Log what becomes of the keepers; when Ray is gone, look for it until it is back."""
        while True:
            assert self._process is not None
            while (report := await self._next_report(self._process)) is not None:
                self._take(report)
            why = self._last_words()
            logger.error(
                "Ray is gone; serving continues, but no engine or rank moves to another node until Ray is back (%s)",
                why,
            )
            await self._relaunch()
            logger.warning("Ray is back")

    async def _relaunch(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)
            try:
                await self._launch()
            except (ConfigError, CapacityError, EngineError, OSError) as error:
                logger.debug("Ray is still gone: %s", error)
                await self._end_process()
            else:
                return

    def _take(self, report: LaunchReport) -> None:
        if isinstance(report, Progress):
            logger.warning("%s", report.text)
        elif isinstance(report, NodeLost):
            self._on_node_lost(report.address)
        elif isinstance(report, KeeperRefused):
            logger.error("%s", report.reason)
            self._refused.add(report.number)
            if len(self._refused) >= self._num_needed and not self._refusal.done():
                self._refusal.set_result(report.reason)

    def _last_words(self) -> str:
        return truncated(self._words[-1]) if self._words else "it said nothing"

    async def _next_report(self, process: asyncio.subprocess.Process) -> LaunchReport | None:
        """Return what the process says next; None: it has ended."""
        assert process.stdout is not None
        line = await process.stdout.readline()
        if not line:
            self._has_order = False
            await process.wait()
            return None
        report: LaunchReport = msgspec.json.decode(line, type=LaunchReport)
        return report

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        """Read what Ray prints: much, when it is gone."""
        assert process.stderr is not None
        async for line in process.stderr:
            if text := line.decode(errors="replace").strip():
                self._words.append(text)
                logger.debug("Ray: %s", text)
