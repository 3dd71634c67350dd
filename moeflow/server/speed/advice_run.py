"""Has advice on a plan worked out by another process, while the engines are idle: it would take their time."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from moeflow.checkpoint.identity import called
from moeflow.core.cache_dir import cache_folder
from moeflow.core.plan import Plan, plan_to_json
from moeflow.kernels.on_demand import on_demand
from moeflow.planner.served.advice_process import AdviceOrder, AdviceReport
from moeflow.settings.settings import from_plain

with on_demand(__name__):
    from moeflow.planner.served import advice
    from moeflow.train import builtin

_MODULE: Final = "moeflow.planner.served.advice_process"
_LOOK_S: Final = 0.1
_WAITS: Final = "worked out once the server is idle"
_RUNS: Final = "being worked out"
_FAILED: Final = "it could not be worked out"


class AdviceRun:
    """The advice on one plan: begun when somebody first asks while nothing runs, and again after an interruption."""

    def __init__(self, plan: Plan, is_idle: Callable[[], bool]) -> None:
        """`is_idle` says whether no engine of this server computes."""
        self._plan = plan
        self._is_idle = is_idle
        self._working: asyncio.Task[None] | None = None
        self._report: AdviceReport | None = None

    @property
    def found(self) -> Sequence[advice.Advice] | None:
        """The advice; None: it is not known."""
        return None if self._report is None or self._report.problem else self._report.advice

    @property
    def why_not(self) -> str:
        """Why there is none; empty: there is."""
        if self._report is not None:
            return self._report.problem
        return _WAITS if self._working is None or self._working.done() else _RUNS

    def ask(self) -> None:
        """Begin, if it is time. Needs a running event loop."""
        is_working = self._working is not None and not self._working.done()
        if self._report is None and not is_working and self._is_idle():
            self._working = asyncio.create_task(self._work())

    async def close(self) -> None:
        """End the process, if it runs."""
        if self._working is not None:
            self._working.cancel()
            await asyncio.gather(self._working, return_exceptions=True)

    async def _work(self) -> None:
        order = await asyncio.to_thread(_order_of, self._plan)
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", _MODULE), stdin=pipe, stdout=pipe, start_new_session=True
        )
        answering = asyncio.create_task(process.communicate(order))
        try:
            while not answering.done() and self._is_idle():
                await asyncio.wait((answering,), timeout=_LOOK_S)
            if answering.done():
                self._report = _report_of(answering.result()[0])
        finally:
            if process.returncode is None:
                process.kill()
            await asyncio.gather(answering, return_exceptions=True)


def _order_of(plan: Plan) -> bytes:
    path, folder = Path(plan.config.model_path), from_plain(plan.settings).cache_dir
    is_builtin = path.absolute() == builtin.builtin_folder(cache_folder(folder)).absolute()
    return msgspec.json.encode(AdviceOrder(plan_to_json(plan), "" if is_builtin else called(path)))


def _report_of(answer: bytes) -> AdviceReport:
    try:
        return msgspec.json.decode(answer, type=AdviceReport)
    except msgspec.DecodeError:
        return AdviceReport(problem=_FAILED)
