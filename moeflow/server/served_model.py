"""One model as requests meet it: its name, its engine if it is loaded, who uses it, and why it takes no work now.

Does not know how it is loaded, nor that there may be others: `model_pool.py` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from moeflow.core.engine_messages import EngineStats, ModelInfo
from moeflow.core.errors import MoeflowError
from moeflow.core.observation import Question, Sight, Watch
from moeflow.core.plan import Plan
from moeflow.engine.client import EngineClient, EngineState, ReplicaStatus
from moeflow.engine.generator import Generator
from moeflow.models.file_facts import FileFacts, read_file_facts
from moeflow.processes.stats_sum import totals_of, with_totals
from moeflow.server.errors import ApiError
from moeflow.server.guard.admission import Admission
from moeflow.server.guard.occupancy import Occupancy

ModelStatus = Literal["unloaded", "loading", "ready", "restarting", "stalled", "failed"]

MAX_WAIT_S = 30.0  # for an engine that is started anew; who would have to wait longer had better ask elsewhere
RETRY_AFTER_S = 5
_REFUSALS: dict[ModelStatus, tuple[str, str]] = {
    "unloaded": ("model_loading", "The model is not loaded; try again"),
    "loading": ("model_loading", "The model is being loaded; try again soon"),
    "restarting": ("engine_restarting", "The engine has died and is started anew; try again soon"),
    "stalled": ("engine_stalled", "The engine does not answer; try again later"),
    "failed": ("engine_unavailable", "The engine has died; the server must be restarted"),
}
_DIED = ("engine_unavailable", "The model's engine has died; the next request loads it again")
_STATUSES: dict[EngineState, ModelStatus] = {
    EngineState.READY: "ready",
    EngineState.RESTARTING: "restarting",
    EngineState.STALLED: "stalled",
    EngineState.DRAINING: "restarting",  # on another machine
    EngineState.GONE: "failed",
}


@dataclass(frozen=True, slots=True)
class Loadable:
    """A model that may be loaded now: it has a plan."""

    memory_bytes: int  # that it holds once it is loaded; 0: not known, so it is loaded alone
    load: Callable[[Callable[[], None]], Awaitable[Generator]]  # takes what to call when its engine has died for good
    plan: Plan | None = None  # that it runs; None: unknown


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model comes from that is loaded when it is asked for."""

    name: str
    path: str  # nobody's business outside
    prepare: Callable[[], Loadable]  # in a thread; may take long
    max_model_len: int | None = None  # that the settings allow; None: as long as the model's context


class ServedModel:
    """A model's state. `attach` and `detach` change its state; the pool keeps the other attributes."""

    def __init__(self, max_queue: int, source: ModelSource | None = None, occupancy: Occupancy | None = None) -> None:
        """Without a source it is attached once, and stays. `occupancy` counts sequences of all processes."""
        self.source = source
        self.name = "" if source is None else source.name  # empty until it is attached
        self.admission = Admission(max_queue, occupancy=occupancy)
        self.generator: Generator | None = None
        self.starting: Sequence[EngineClient] = ()  # until it is attached
        self.is_loading = source is None
        self.memory_bytes = 0  # that it was planned to hold, while it is loaded
        self.plan: Plan | None = None  # that it runs; None: unknown, or not loaded
        self.used_at_s = -math.inf
        self.created = int(time.time())
        self.num_loads = 0
        self.num_failed_loads = 0
        self.load_s_total = 0.0
        self._num_users = 0
        self._looking: set[asyncio.Task[dict[int, Sight]]] = set()
        self._file_facts: asyncio.Future[FileFacts | None] | None = None
        self._earlier = EngineStats()  # of engines that it had before

    def attach(self, generator: Generator, memory_bytes: int = 0) -> None:
        """Begin to serve with this generator."""
        self.generator, self.memory_bytes, self.is_loading = generator, memory_bytes, False
        self.starting = ()
        self.name = self.name or generator.client.model.name

    def detach(self) -> Generator:
        """Return the generator, which serves no request any more."""
        generator = self.generator
        assert generator is not None, "only what is loaded is detached"
        self._earlier = totals_of(self.stats())
        self.generator, self.plan, self.memory_bytes = None, None, 0
        return generator

    @property
    def loaded(self) -> Generator:
        """The generator of a model that is known to be loaded."""
        assert self.generator is not None, "whoever asks has required it"
        return self.generator

    @property
    def info(self) -> ModelInfo:
        """What a loaded model is."""
        return self.loaded.client.model

    @property
    def num_places(self) -> int:
        """The number of requests that the ready engines compute at once. Without a ready engine: that of one."""
        if self.generator is None:
            return 1
        replicas = self.generator.client.replicas()
        num_ready = sum(replica.state is EngineState.READY for replica in replicas)
        num_staying = sum(replica.state is not EngineState.DRAINING for replica in replicas)
        return max(self.info.max_num_seqs // max(num_staying, 1), 1) * max(num_ready, 1)

    async def file_facts(self) -> FileFacts | None:
        """Return what the headers of its files say, read once, in a thread; None if they cannot be read."""
        if self._file_facts is None:
            path = self.info.path if self.source is None else self.source.path
            self._file_facts = asyncio.ensure_future(asyncio.to_thread(_read_file_facts, path))
        return await asyncio.shield(self._file_facts)

    @property
    def status(self) -> ModelStatus:
        """What a request would meet now."""
        if self.generator is None:
            return "loading" if self.is_loading else "unloaded"
        return _STATUSES[self.generator.client.state]

    @property
    def is_idle(self) -> bool:
        """Whether it is unused."""
        return not (self._num_users or self.admission.num_open)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep it from being unloaded meanwhile."""
        self._num_users += 1
        try:
            yield
        finally:
            self._num_users -= 1

    def require(self, *, is_batch: bool) -> None:
        """Return if it takes work.

        While the engine is started anew, requests wait for it, unless that takes long; those of batch jobs always do.

        Raises: ApiError 503 with the reason.
        """
        if not (self._may_wait or (is_batch and self.is_lasting)):
            raise self.refusal()

    def require_engine(self, generator: Generator) -> None:
        """Return unless running requests of this generator cannot continue. Raises: ApiError 503 with the reason."""
        if generator.client.state is EngineState.GONE:
            code, message = _REFUSALS["failed"] if self.source is None else _DIED
            raise ApiError(503, code, message, headers={"Retry-After": str(RETRY_AFTER_S)})

    @property
    def is_lasting(self) -> bool:
        """Whether requests that can wait will be computed, now or later."""
        return self.status in ("ready", "restarting", "stalled")

    def refusal(self) -> ApiError:
        """Return the error for requests that are not accepted now."""
        code, message = _REFUSALS[self.status]
        back_in_s = 0.0 if self.generator is None else self.generator.client.back_in_s
        retry_after_s = max(math.ceil(back_in_s), 1) if self.status == "restarting" else RETRY_AFTER_S
        return ApiError(503, code, message, headers={"Retry-After": str(retry_after_s)})

    @property
    def _may_wait(self) -> bool:
        """Whether a new request is computed at once, or soon enough."""
        if self.status == "restarting":
            return self.loaded.client.back_in_s <= MAX_WAIT_S
        return self.status == "ready"

    def stats(self) -> EngineStats:
        """The engine's newest snapshot, with the totals of earlier engines."""
        now = EngineStats() if self.generator is None else self.generator.client.stats()
        return with_totals(now, self._earlier)

    def replicas(self) -> list[ReplicaStatus]:
        """How each of its engines is; none while it is neither loaded nor begun."""
        clients = self.starting if self.generator is None else [self.generator.client]
        return [replica for client in clients for replica in client.replicas()]

    async def look(self, question: Question) -> dict[int, Sight]:
        """Return the answers of its engines; see `EngineClient.look`. None answers while it is not loaded."""
        return {} if self.generator is None else await self.generator.client.look(question)

    def watch(self) -> None:
        """Have its engines observe their passes for a time. Never waits."""
        if self.generator is not None:
            looking = asyncio.create_task(self.look(Watch()))
            self._looking.add(looking)
            looking.add_done_callback(self._looking.discard)


def _read_file_facts(path: str) -> FileFacts | None:
    try:
        return read_file_facts(path)
    except (MoeflowError, OSError):
        return None  # a request for the model gets the reason
