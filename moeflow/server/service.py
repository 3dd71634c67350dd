"""What all requests share: the engine behind the server and whether it takes work now.

The server may listen before its model is loaded, so the generator comes later, once.
"""

from __future__ import annotations

import time
from typing import Literal

from fastapi import Request

from moeflow.engine.generator import Generator
from moeflow.engine.messages import EngineStats
from moeflow.server.config import ServerConfig
from moeflow.server.errors import ApiError
from moeflow.server.guard.admission import Admission
from moeflow.server.metrics import Metrics

Status = Literal["loading", "ready", "draining", "failed"]

_REFUSALS: dict[Status, tuple[str, str]] = {
    "loading": ("model_loading", "The model is being loaded; try again soon"),
    "draining": ("shutting_down", "The server is shutting down and takes no new requests"),
    "failed": ("engine_unavailable", "The engine has died; the server must be restarted"),
}


class Service:
    """One server's state. Attributes are read by endpoints; only `attach` and `drain` change what it is."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.admission = Admission(config.max_queue)
        self.metrics = Metrics(self.stats, lambda: self.admission.num_unfinished)
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
        if self._generator is not None and not self._generator.client.is_alive and not self._is_draining:
            return "failed"
        if self._is_draining:
            return "draining"
        return "loading" if self._generator is None else "ready"

    @property
    def loaded(self) -> Generator | None:
        """The generator, whether or not it can take work now."""
        return self._generator

    def require_generator(self) -> Generator:
        """Return the generator if it takes work.

        Raises: ApiError 503 with the reason.
        """
        status = self.status
        if self._generator is None or status != "ready":
            code, message = _REFUSALS[status]
            raise ApiError(503, code, message, headers={"Retry-After": "5"})
        return self._generator

    def stats(self) -> EngineStats | None:
        """The engine's newest snapshot; None before it is there."""
        return None if self._generator is None else self._generator.client.stats()


def get_service(request: Request) -> Service:
    """Return the service of the application that got this request; for FastAPI's `Depends`."""
    service: Service = request.app.state.service
    return service
