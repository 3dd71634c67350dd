"""Engines that die on a test's command: the real step loop over the fake model, in this process.

`World` starts them, one after the other or in parallel. At each pass, it decides to end the engine, stop it for a
while, or continue. The output of a pass is delivered one pass later, so that a death can lose it, as in a socket. A
stopped engine gets its messages once it continues.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from enum import Enum

from moeflow.core.batch import Batch
from moeflow.core.engine_messages import EngineStats, Submission, TokenOutput
from moeflow.core.errors import EngineError
from moeflow.core.observation import Question, Sight
from moeflow.engine.client import EngineState
from moeflow.processes.deaths import Death
from moeflow.processes.sinks import Sink, Sinks
from tests.engine.fake_runner import make_engine

OUTSIDE = Death("SIGKILL, not for lack of memory: another process sent it", is_from_outside=True)
CRASH = Death("SIGSEGV")


class Loss(Enum):
    """When in a pass an engine ends."""

    IN_PASS = "in a pass; all that came before has arrived"
    LATE = "in a pass; what the one before it brought is lost"
    BETWEEN = "after a pass, whose tokens are lost"


class EndOfLife(BaseException):
    """The engine's process ends here."""


class World:
    """Starts engines. `kills` maps passes, counted over all engines, to the way an engine is killed.

    `is_deadly` says of a batch whether the engine crashes of it; `stops` maps passes to the number of turns of the
    event loop that an engine stops for.
    """

    def __init__(
        self,
        kills: Mapping[int, Loss] | None = None,
        is_deadly: Callable[[Batch], bool] = lambda batch: False,
        *,
        crash: Death = CRASH,
        loss: Loss = Loss.IN_PASS,
        stops: Mapping[int, int] | None = None,
        start_turns: int = 3,
        **engine_options: object,
    ) -> None:
        self.kills = dict(kills or {})
        self.is_deadly = is_deadly
        self.crash = crash
        self.loss = loss  # of crashes
        self.stops = dict(stops or {})
        self.start_turns = start_turns
        self.engine_options = engine_options
        self.num_passes = 0
        self.num_deaths = 0
        self.fail_starts = 0  # so many starts from now on fail
        self.batches: list[dict[str, int]] = []
        self.engine: MortalEngine | None = None  # the newest
        self.submitted: list[tuple[MortalEngine, Submission]] = []

    async def start(
        self,
        *,
        on_begun: Callable[[MortalEngine], None],
        on_failure: Callable[[], None],
        on_change: Callable[[], None],
        on_progress: Callable[[int, int], None] | None = None,
    ) -> MortalEngine:
        for _ in range(self.start_turns):
            await asyncio.sleep(0)
        if self.fail_starts:
            self.fail_starts -= 1
            raise EngineError("not enough memory")
        self.engine = MortalEngine(self, on_failure, on_change)
        return self.engine


class MortalEngine:
    """One life. See `ProcessEngine` for what its methods promise."""

    host = activity = ""

    def __init__(self, world: World, on_failure: Callable[[], None], on_change: Callable[[], None]) -> None:
        self._world = world
        self._on_failure = on_failure
        self._on_change = on_change
        self._engine, self._runner = make_engine(**world.engine_options)
        self._engine._on_pass = self._before_pass
        self._sinks = Sinks()
        self._unsent: list[TokenOutput] = []
        self._unheard: list[Callable[[], None]] = []  # messages received while stopped
        self._stats = self._engine.stats()  # as of the last pass
        self._stopped_turns = 0  # left until it continues
        self._death: Death | None = None
        self._living = asyncio.create_task(self._live())
        self.model = self._engine.model
        self.state = EngineState.READY
        self.pass_s = self.longest_pass_s = 0.0

    @property
    def death(self) -> Death:
        assert self._death is not None
        return self._death

    def stats(self) -> EngineStats:
        return self._stats

    async def ask(self, question: Question) -> Sight | None:
        return self._engine.look(question) if self.state is EngineState.READY and self._death is None else None

    def submit(self, submission: Submission, sink: Sink) -> None:
        assert self._death is None, "its socket is closed"
        self._world.submitted.append((self, submission))
        self._sinks.add(submission.request_id, sink)
        self._tell(lambda: self._engine.submit(submission))

    def abandon(self, request_id: str) -> None:
        if self._sinks.abandon(request_id):
            self._tell(lambda: self._engine.cancel([request_id]))

    def _tell(self, message: Callable[[], None]) -> None:
        if self.state is EngineState.STALLED or self._unheard:
            self._unheard.append(message)
        else:
            message()

    async def shutdown(self, deadline_s: float) -> None:
        if self._death is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(deadline_s):
                    while self._engine.has_work or self._unsent:
                        await asyncio.sleep(0)
        self._living.cancel()
        await asyncio.gather(self._living, return_exceptions=True)

    async def _live(self) -> None:
        try:
            while True:
                await asyncio.sleep(0)
                if self._stopped_turns:
                    self._stand_still()
                elif self._engine.has_work:
                    self._step()
                else:
                    self._hand_out()
                self._stats = self._engine.stats()
        except EndOfLife:
            self._world.num_deaths += 1
            self._on_failure()
            self._sinks.end()

    def stop(self, turns: int) -> None:
        """Do nothing for so many turns of the event loop."""
        self._stopped_turns = turns
        self.state = EngineState.STALLED
        self._on_change()

    def _stand_still(self) -> None:
        self._stopped_turns -= 1
        if not self._stopped_turns:
            self.state = EngineState.READY
            self._on_change()  # before it reads any message, like a continued process
            while self._unheard:
                self._unheard[0]()
                del self._unheard[0]

    def _step(self) -> None:
        outputs = self._engine.step()
        self._engine.check_integrity()
        if self._world.kills.get(self._world.num_passes - 1) is Loss.BETWEEN:
            self._die(OUTSIDE, {})
        self._unsent += outputs
        if turns := self._world.stops.get(self._world.num_passes - 1):
            self.stop(turns)

    def _before_pass(self, batch: Batch) -> None:
        world = self._world
        in_pass = {entry.request.request_id: len(entry.request.output_token_ids) for entry in batch.entries}
        world.batches.append(in_pass)
        kill = world.kills.get(world.num_passes)
        world.num_passes += 1
        is_deadly = world.is_deadly(batch)
        if (world.loss if is_deadly else kill) is not Loss.LATE:
            self._hand_out()
        if is_deadly:
            self._die(world.crash, in_pass)
        if kill in (Loss.IN_PASS, Loss.LATE):
            self._die(OUTSIDE, in_pass)
        self._hand_out()

    def _hand_out(self) -> None:
        outputs, self._unsent = self._unsent, []
        for output in outputs:
            self._sinks.hand_out(output)
        self._on_change()

    def _die(self, death: Death, in_pass: dict[str, int]) -> None:
        self._death = Death(death.reason, death.is_from_outside, in_pass)
        raise EndOfLife
