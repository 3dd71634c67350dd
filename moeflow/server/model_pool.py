"""All models of a server: finds the one that a request names, loads it if it is not there, and unloads others for it.

Models share one memory budget. If it would be exceeded, the least recently used models are unloaded, but never one in
use. A request that needs its memory waits for a limited time, and is then refused. A request that waits for memory for
long precedes new requests for loaded models. Else a model that is never idle would exclude others for ever.

A model without a source is there from the start and stays: a server of one model has just that.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

from moeflow.core.engine_messages import EngineStats
from moeflow.core.errors import MoeflowError, QueueFullError
from moeflow.core.units import format_bytes
from moeflow.engine.client import ReplicaStatus
from moeflow.engine.generator import Generator
from moeflow.processes.stats_sum import summed
from moeflow.server.errors import ApiError
from moeflow.server.guard.occupancy import Occupancy
from moeflow.server.served_model import MAX_WAIT_S, RETRY_AFTER_S, ModelSource, ServedModel

logger = logging.getLogger(__name__)

PATIENCE_S = 5.0  # how long new requests for loaded models go before one that waits for memory
_BATCH_PAUSE_S = 4 * RETRY_AFTER_S  # jobs begin nothing for so long where a request was refused because of their work
_LOOK_S = 0.02
_FIXED = (
    "This server has one fixed model, so no other one can be loaded. To load and unload models, start it with several: "
    "`moeflow serve --model MODEL --model MODEL`"
)
_MAX_NAMED = 20  # models in a message
_LATEST = ":latest"  # the tag that a name without one has in Ollama


class ModelLoadError(ApiError):
    """A model that cannot be loaded; the next request tries again."""


class ModelPool:
    """The models, in the order of their names' listing. The first one is meant where a request names none."""

    def __init__(
        self,
        sources: Sequence[ModelSource] = (),
        *,
        max_queue: int,
        budget_bytes: int = 0,
        max_wait_s: float = MAX_WAIT_S,
        patience_s: float = PATIENCE_S,
        occupancy: Occupancy | None = None,
        source_of: Callable[[str, str], ModelSource] | None = None,
    ) -> None:
        """Without sources there is one model, which has to be attached. The budget is that of those with sources.

        `occupancy` counts the one model's sequences in all processes of the server. `source_of` returns the source for
        a name and a path, of a model that comes later; without it, the models are those of the start.
        """
        one = [ServedModel(max_queue, occupancy=occupancy)]
        self._models = [ServedModel(max_queue, source) for source in sources] or one
        self._max_queue = max_queue
        self._budget_bytes = budget_bytes
        self._source_of = source_of
        self._max_wait_s, self._patience_s = max_wait_s, patience_s
        self._loading: dict[ServedModel, asyncio.Task[None]] = {}
        self._num_waiting: dict[ServedModel, int] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._one_at_a_time = asyncio.Lock()
        self._wanted_since_s: float | None = None  # memory, by the one that waits for it
        self._refused_at_s = float("-inf")
        self._is_closed = False

    @property
    def all(self) -> Sequence[ServedModel]:
        """Every model, loaded or not."""
        return self._models

    @property
    def named(self) -> list[ServedModel]:
        """Every model but one that is not known yet."""
        return [model for model in self._models if model.name]

    @property
    def only(self) -> ServedModel | None:
        """The one model; None: there are several, which come and go."""
        return self._models[0] if self._models[0].source is None else None

    @property
    def num_unfinished(self) -> int:
        """Sequences admitted and not finished, as the queue bounds count them."""
        return sum(model.admission.num_unfinished for model in self._models)

    def stats(self) -> EngineStats:
        """The newest combined snapshot of all engines, with the totals of unloaded ones."""
        return summed([model.stats() for model in self._models])

    def replicas(self) -> list[ReplicaStatus]:
        """How each of the engines is."""
        return [replica for model in self._models for replica in model.replicas()]

    def find(self, name: str | None) -> ServedModel:
        """Return the model of that name, or the first. The tag `:latest` may be added or missing.

        Raises: ApiError 404 with the names that there are.
        """
        if name is None or not self._models[0].name:
            return self._models[0]
        spellings = (name, name.removesuffix(_LATEST), name + _LATEST)
        found = next((model for each in spellings for model in self._models if model.name == each), None)
        if found is None:
            names = ", ".join(repr(model.name) for model in self._models[:_MAX_NAMED])
            more = len(self._models) - _MAX_NAMED
            message = f"model {name[:80]!r} not found; this server has {names}"
            raise ApiError(404, "model_not_found", message + (f" and {more} more" if more > 0 else ""), param="model")
        return found

    @property
    def can_grow(self) -> bool:
        """Whether models may be added."""
        return self._source_of is not None

    def add(self, name: str, path: str) -> ServedModel:
        """Return the model of that path, which is served from now on if it was not. It is not loaded.

        Raises: ApiError 409 if no model can be added, or another one has the name.
        """
        found = next((it for it in self._models if it.source is not None and it.source.path == path), None)
        if found is not None:
            return found
        if self._source_of is None:
            raise ApiError(409, "models_fixed", _FIXED, param="model")
        source = self._source_of(name, path)
        if any(model.name == source.name for model in self._models):
            message = f"another model is called {source.name!r} here: restart with --model NAME={name}"
            raise ApiError(409, "model_name_taken", message, param="model")
        model = ServedModel(self._max_queue, source)
        self._models.append(model)
        logger.info("model %s is added, and loaded when it is asked for", model.name)
        return model

    async def load(self, model: ServedModel, *, is_batch: bool = False) -> None:
        """Return when a model is loaded; that is so until the caller awaits something, or uses it.

        Blocks: while it is loaded, and before that for memory; requests of batch jobs also for as long as others wait.
        Raises: ModelLoadError; ApiError 503 if models that are busy hold the memory; QueueFullError.
        """
        if model.source is None:
            return
        deadline_s = time.monotonic() + self._max_wait_s
        while model.generator is not None and self._is_held_back(is_batch=is_batch) and not self._is_closed:
            if not is_batch and time.monotonic() >= deadline_s:
                raise self._busy(f"Requests for other models go before those for {model.name!r} now")
            await asyncio.sleep(_LOOK_S)
        while model.generator is None and not self._is_closed:
            await self._loaded(model)  # then this request is next, before waiting ones
        model.used_at_s = time.monotonic()

    async def _loaded(self, model: ServedModel) -> None:
        """Wait until a load, the one under way or a new one, has ended."""
        waiting = self._num_waiting.get(model, 0)
        if waiting > self._max_queue:
            raise QueueFullError(
                f"{waiting} requests wait for {model.name!r} to be loaded; try again later", retry_after_s=RETRY_AFTER_S
            )
        self._num_waiting[model] = waiting + 1
        try:
            with model.in_use():
                loading = self._loading.get(model) or self._begin(model)
                await asyncio.wait((loading,))
        finally:
            self._num_waiting[model] -= 1
        if not loading.cancelled() and (error := loading.exception()) is not None:
            raise error

    def _begin(self, model: ServedModel) -> asyncio.Task[None]:
        loading = self._loading[model] = asyncio.create_task(self._load(model))
        model.is_loading = True

        def forget(done: asyncio.Task[None]) -> None:
            del self._loading[model]
            model.is_loading = False
            if not done.cancelled():
                done.exception()  # was reported to waiting requests

        loading.add_done_callback(forget)
        return loading

    async def _load(self, model: ServedModel) -> None:
        assert model.source is not None, "what has no source is never unloaded"
        begun_s = time.monotonic()
        try:
            loadable = await asyncio.to_thread(model.source.prepare)
            num_bytes = min(loadable.memory_bytes or self._budget_bytes, self._budget_bytes)
            async with self._one_at_a_time:
                await self._make_room(model, num_bytes)
                generator = await loadable.load(partial(self._note_death, model))
        except (MoeflowError, OSError) as error:
            model.num_failed_loads += 1
            logger.error("model %s cannot be loaded: %s", model.name, error)
            reason = str(error).replace(model.source.path, model.name)
            raise ModelLoadError(
                500, "model_load_failed", f"The model {model.name!r} cannot be loaded: {reason}", param="model"
            ) from error
        model.attach(generator, num_bytes)
        model.plan = loadable.plan
        model.num_loads += 1
        model.load_s_total += time.monotonic() - begun_s
        logger.info("model %s is loaded, and may hold %s", model.name, format_bytes(num_bytes))

    @property
    def fixed_reason(self) -> str:
        """Why models neither come nor go here, with what to start instead; "" if they do."""
        return _FIXED if self.only is not None else ""

    def require_several(self) -> None:
        """Return if models come and go here. Raises: ApiError 409."""
        if self.fixed_reason:
            raise ApiError(409, "models_fixed", self.fixed_reason)

    def unload(self, model: ServedModel) -> None:
        """Unload a model, unless it is in use, or stays because nothing could load it again."""
        if model.source is not None and model.generator is not None and model.is_idle:
            self._begin_unloading(model)

    def _note_death(self, model: ServedModel) -> None:
        """Unload a model whose engine has died for good; the next request loads it again."""
        if model.generator is not None and not self._is_closed:
            self._begin_unloading(model)

    async def _make_room(self, model: ServedModel, num_bytes: int) -> None:
        """Unload the least recently used models, as soon as idle ones have enough memory. Raises: ApiError 503."""
        self._wanted_since_s = time.monotonic()
        try:
            while (missing_bytes := self._held_bytes + num_bytes - self._budget_bytes) > 0:
                leaving = self._least_used(missing_bytes)
                if leaving:
                    await asyncio.wait([self._begin_unloading(each) for each in leaving])
                elif time.monotonic() - self._wanted_since_s < self._max_wait_s:
                    await asyncio.sleep(_LOOK_S)
                else:
                    raise self._busy(f"There is no memory for {model.name!r} ({format_bytes(num_bytes)}) now")
        finally:
            self._wanted_since_s = None

    @property
    def _held_bytes(self) -> int:
        return sum(model.memory_bytes for model in self._models)

    def _least_used(self, num_bytes: int) -> list[ServedModel]:
        """Return idle models with this total of bytes; none if they do not suffice."""
        idle = [model for model in self._models if model.generator is not None and model.is_idle]
        found: list[ServedModel] = []
        for model in sorted(idle, key=lambda it: it.used_at_s):
            if num_bytes > 0:
                found.append(model)
                num_bytes -= model.memory_bytes
        return [] if num_bytes > 0 else found

    def _begin_unloading(self, model: ServedModel) -> asyncio.Task[None]:
        """End a model's engine; from now on requests have to load it."""
        generator = model.detach()
        ending = asyncio.create_task(_end(generator))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
        logger.info("model %s is unloaded", model.name)
        return ending

    def _is_held_back(self, *, is_batch: bool) -> bool:
        """Whether a new request for a loaded model has to wait, as somebody else waits for memory: long, or of jobs."""
        now_s = time.monotonic()
        if is_batch and (self._wanted_since_s is not None or now_s - self._refused_at_s < _BATCH_PAUSE_S):
            return True
        return self._wanted_since_s is not None and now_s - self._wanted_since_s >= self._patience_s

    def _busy(self, why: str) -> ApiError:
        self._refused_at_s = time.monotonic()
        busy = [repr(model.name) for model in self._models if model.generator is not None and not model.is_idle]
        return ApiError(
            503,
            "models_busy",
            f"{why}: {', '.join(busy) or 'others'} {'is' if len(busy) == 1 else 'are'} at work; try again soon",
            headers={"Retry-After": str(RETRY_AFTER_S)},
        )

    def close(self) -> None:
        """Stop loading; waiting requests are refused."""
        self._is_closed = True
        for loading in self._loading.values():
            loading.cancel()

    async def shutdown(self, deadline_s: float) -> None:
        """Let running requests finish within the deadline, cancel the rest, end all engines."""
        self.close()
        loaded = [model.generator for model in self._models if model.generator is not None]
        await asyncio.gather(*(generator.client.shutdown(deadline_s) for generator in loaded))
        await asyncio.gather(*self._loading.values(), *self._ending, return_exceptions=True)


async def _end(generator: Generator) -> None:
    await generator.client.shutdown(0)
    generator.close()
