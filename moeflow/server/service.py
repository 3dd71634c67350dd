"""What all requests share: the models behind the server and whether it takes work now.

The server may listen before its one model is loaded, which then comes later, once; several come and go.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

from fastapi import Request

from moeflow.checkpoint.hub.model_name import ModelName
from moeflow.core.plan import Plan
from moeflow.engine.client import EngineClient
from moeflow.engine.generator import Generator
from moeflow.kernels.on_demand import on_demand
from moeflow.server.config import ServerConfig
from moeflow.server.downloads import add_downloaded
from moeflow.server.errors import ApiError
from moeflow.server.guard.api_keys import ApiKeys
from moeflow.server.guard.large_bodies import LargeBodies
from moeflow.server.metrics import Metrics
from moeflow.server.model_pool import ModelPool
from moeflow.server.pulls import Pulls
from moeflow.server.response_store import Conversations, OwnConversations, ResponseStore
from moeflow.server.served_model import RETRY_AFTER_S, ServedModel
from moeflow.server.stories.stories import Stories

logger = logging.getLogger(__name__)

with on_demand(__name__):
    from moeflow.server.speed import model_speed

Status = Literal["loading", "ready", "restarting", "stalled", "draining", "failed"]


@dataclass(frozen=True, slots=True)
class FrontState:
    """A process that answers HTTP before the same engines."""

    number: int  # from 1 on
    is_ready: bool  # it takes requests
    stopped_s: float  # that it has not run for; 0: it runs


class Service:
    """One server's state. Endpoints read the attributes; only `attach` and `drain` change its state."""

    def __init__(
        self, config: ServerConfig, models: ModelPool | None = None, conversations: Conversations | None = None
    ) -> None:
        """Without models there is one, which comes later. Without `conversations`, they are kept here."""
        self.config = config
        self.models = models or ModelPool(max_queue=config.max_queue)
        self.large_bodies = LargeBodies(config.max_body_bytes)
        self.metrics = Metrics(self.models)
        self.keys = ApiKeys(config) if config.needs_key else None
        self.metrics.requests.show_keys(self.keys.names if self.keys else ())
        self.stories = Stories()
        self.responses = ResponseStore()
        self.conversations = conversations or OwnConversations(self.responses)
        self.fronts: Callable[[], Sequence[FrontState]] = tuple  # replaced where there are some
        self.pulls = Pulls(self._serve_pulled)
        self.started_s = time.monotonic()
        self._speeds: dict[ServedModel, model_speed.ModelSpeed] = {}  # of models whose speed was asked for
        self._is_draining = False

    def show_start(self, starting: Sequence[EngineClient], plan: Plan | None = None) -> None:
        """Show the engines of the one model until it is attached; the sequence may fill later. It runs this plan."""
        if self.models.only is not None:
            self.models.only.starting, self.models.only.plan = starting, plan

    def speed_of(self, model: ServedModel) -> model_speed.ModelSpeed | None:
        """Return what is known of the speed of a loaded model; None: its plan is unknown."""
        if model.plan is None:
            return None
        known = self._speeds.get(model)
        if known is None or known.plan is not model.plan:
            known = self._speeds[model] = model_speed.ModelSpeed(model.plan, self._is_idle)
        return known

    async def watch_other_programs(self, model: ServedModel) -> None:
        """Note how much of the processor other programs have, at most every few seconds: a page watches."""
        known = self.speed_of(model)
        if known is not None and known.others.is_due:
            await asyncio.to_thread(known.others.look_now)

    async def close(self) -> None:
        """End the processes that work for the page: a pull, and advice."""
        await self.pulls.cancel()
        for known in self._speeds.values():
            await known.advice.close()

    def _is_idle(self) -> bool:
        stats = self.models.stats()
        return not (stats.num_running or stats.num_waiting)

    def attach(self, generator: Generator) -> None:
        """Begin to serve the one model with this generator."""
        model = self.models.only
        assert model is not None, "of several models, each is loaded when it is asked for"
        model.attach(generator)
        self.metrics.generation.of(model.name)

    def _serve_pulled(self, name: ModelName, path: str) -> None:
        """Have a model that has been pulled served, where models may be added."""
        if self.models.can_grow:
            try:
                add_downloaded(self.models, name, path)
            except ApiError as error:
                logger.warning("%s is pulled, and not served: %s", name, error.detail)

    def reload_keys(self) -> None:
        """Read the file of keys again. Raises: ConfigError; the keys then stay as they are."""
        if self.keys is not None:
            self.keys.reload()
            self.metrics.requests.show_keys(self.keys.names)

    def drain(self) -> None:
        """Refuse new requests from now on; running ones go on."""
        self._is_draining = True
        self.models.close()

    @property
    def status(self) -> Status:
        """What a request would meet now: of several models, one that is loaded for it if need be."""
        if self._is_draining:
            return "draining"
        only = self.models.only
        if only is None or only.status == "unloaded":
            return "ready"
        return only.status

    @property
    def loaded(self) -> Generator | None:
        """The one model's generator, whether or not it can take work now; None: it is not there, or there are more."""
        return None if self.models.only is None else self.models.only.generator

    async def require_model(self, name: str | None, *, is_batch: bool = False) -> ServedModel:
        """Return the model of that name, or the first, if it takes work. Everything is loaded.

        It stays loaded until the caller awaits something, or its admission has given a ticket.

        Raises: ApiError 404 for an unknown name, 503 with the reason; as `ModelPool.load` and `ServedModel.require`.
        """
        self.require_open()
        model = self.models.find(name)
        await self.models.load(model, is_batch=is_batch)
        self.require_open()
        model.require(is_batch=is_batch)
        if name is not None:
            self.models.find(name)  # one that comes later has no name before
        return model

    @asynccontextmanager
    async def using(self, name: str | None) -> AsyncIterator[ServedModel]:
        """Yield what `require_model` returns, and keep it loaded. Raises: as that."""
        model = await self.require_model(name)
        with model.in_use():
            yield model

    def require_open(self) -> None:
        """Return unless the server is about to end. Raises: ApiError 503."""
        if self._is_draining:
            raise self.refusal()

    def is_lasting(self, name: str) -> bool:
        """Whether requests for a model that can wait will be computed, now or later."""
        if self._is_draining:
            return False
        return any(model.name == name and (model.source or model.is_lasting) for model in self.models.all)

    def refusal(self) -> ApiError:
        """Return the error for requests that are not accepted now."""
        if self._is_draining or self.models.only is None:
            message = "The server is shutting down and takes no new requests"
            return ApiError(503, "shutting_down", message, headers={"Retry-After": str(RETRY_AFTER_S)})
        return self.models.only.refusal()


def get_service(request: Request) -> Service:
    """Return the service of the application that got this request; for FastAPI's `Depends`."""
    service: Service = request.app.state.service
    return service
