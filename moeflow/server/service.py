"""What all requests share: the engine behind the server and whether it takes work now.

The server may listen before its model is loaded, so the generator comes later, once.
"""

from __future__ import annotations

import math
import time
from typing import Literal

from fastapi import Request

from moeflow.engine.client import EngineState, ReplicaStatus
from moeflow.engine.generator import Generator
from moeflow.engine.messages import EngineStats, ModelInfo
from moeflow.server.config import ServerConfig
from moeflow.server.errors import ApiError
from moeflow.server.guard.admission import Admission
from moeflow.server.guard.large_bodies import LargeBodies
from moeflow.server.metrics import Metrics
from moeflow.server.response_store import ResponseStore

Status = Literal["loading", "ready", "restarting", "stalled", "draining", "failed"]

MAX_WAIT_S = 30.0  # for an engine that is started anew; who would have to wait longer had better ask elsewhere
_RETRY_AFTER_S = 5
_REFUSALS: dict[Status, tuple[str, str]] = {
    "loading": ("model_loading", "The model is being loaded; try again soon"),
    "restarting": ("engine_restarting", "The engine has died and is started anew; try again soon"),
    "stalled": ("engine_stalled", "The engine does not answer; try again later"),
    "draining": ("shutting_down", "The server is shutting down and takes no new requests"),
    "failed": ("engine_unavailable", "The engine has died; the server must be restarted"),
}
_STATUSES: dict[EngineState, Status] = {
    EngineState.READY: "ready",
    EngineState.RESTARTING: "restarting",
    EngineState.STALLED: "stalled",
    EngineState.GONE: "failed",
}


class Service:
    """One server's state. Attributes are read by endpoints; only `attach` and `drain` change what it is."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.admission = Admission(config.max_queue)
        self.large_bodies = LargeBodies(config.max_body_bytes)
        self.metrics = Metrics(self.stats, self.replicas, lambda: self.admission.num_unfinished, self._model)
        self.responses = ResponseStore()
        self.started_s = time.monotonic()
        self._generator: Generator | None = None
        self._is_draining = False

    def attach(self, generator: Generator) -> None:
        """Begin to serve with this generator."""
        self._generator = generator

    def drain(self) -> None:
        """Refuse new requests from now on; running ones go on."""
        self._is_draining = True

    @property
    def status(self) -> Status:
        """What a request would meet now."""
        if self._is_draining:
            return "draining"
        return "loading" if self._generator is None else _STATUSES[self._generator.client.state]

    @property
    def is_lasting(self) -> bool:
        """Whether requests that can wait will be computed, now or later."""
        return self.status in ("ready", "restarting", "stalled")

    @property
    def loaded(self) -> Generator | None:
        """The generator, whether or not it can take work now."""
        return self._generator

    def _model(self) -> ModelInfo | None:
        return None if self._generator is None else self._generator.client.model

    def require_generator(self, *, is_batch: bool = False) -> Generator:
        """Return the generator if it takes work.

        While the engine is started anew, requests wait for it, unless that takes long; those of batch jobs always do.

        Raises: ApiError 503 with the reason.
        """
        if self._generator is None or not (self._may_wait or (is_batch and self.is_lasting)):
            raise self.refusal()
        return self._generator

    def require_engine(self) -> None:
        """Return unless what is under way cannot go on. Raises: ApiError 503 with the reason."""
        if not self.is_lasting:
            raise self.refusal()

    def refusal(self) -> ApiError:
        """Return the error for requests that are not accepted now."""
        code, message = _REFUSALS[self.status]
        back_in_s = 0.0 if self._generator is None else self._generator.client.back_in_s
        retry_after_s = max(math.ceil(back_in_s), 1) if self.status == "restarting" else _RETRY_AFTER_S
        return ApiError(503, code, message, headers={"Retry-After": str(retry_after_s)})

    @property
    def _may_wait(self) -> bool:
        """Whether a new request is computed at once, or soon enough."""
        if self.status == "restarting" and self._generator is not None:
            return self._generator.client.back_in_s <= MAX_WAIT_S
        return self.status == "ready"

    def stats(self) -> EngineStats | None:
        """The engine's newest snapshot; None before it is there."""
        return None if self._generator is None else self._generator.client.stats()

    def replicas(self) -> list[ReplicaStatus]:
        """How each of the engines is; none before the first is there."""
        return [] if self._generator is None else self._generator.client.replicas()


def get_service(request: Request) -> Service:
    """Return the service of the application that got this request; for FastAPI's `Depends`."""
    service: Service = request.app.state.service
    return service
