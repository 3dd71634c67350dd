"""The speed of one served model as it is asked for: its estimate, read when somebody first looks, and advice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from moeflow.core.errors import MoeflowError
from moeflow.core.plan import Plan
from moeflow.planner.served.served_estimate import ServedEstimate, served_estimate
from moeflow.server.speed.advice_run import AdviceRun
from moeflow.server.speed.other_programs import OtherPrograms


class ModelSpeed:
    """What is known of one plan that is served."""

    def __init__(self, plan: Plan, is_idle: Callable[[], bool]) -> None:
        """`is_idle` says whether no engine of this server computes."""
        self.plan = plan
        self.advice = AdviceRun(plan, is_idle)
        self.others = OtherPrograms()
        self._reading: asyncio.Task[ServedEstimate | str] | None = None

    async def estimate(self) -> ServedEstimate | str:
        """Return what predicts, read once, in a thread; or why it cannot be read."""
        if self._reading is None:
            self._reading = asyncio.create_task(asyncio.to_thread(_read, self.plan))
        return await asyncio.shield(self._reading)


def _read(plan: Plan) -> ServedEstimate | str:
    try:
        return served_estimate(plan)
    except (MoeflowError, OSError) as error:
        return str(error).replace(plan.config.model_path, plan.config.model_name)
