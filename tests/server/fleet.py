"""Several models behind one application, with engines that say fixed texts and record loads and unloads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
from fastapi import FastAPI

from moeflow.core.engine_messages import EngineStats
from moeflow.core.errors import CapacityError
from moeflow.engine.generator import Generator
from moeflow.server.app import create_app
from moeflow.server.config import ServerConfig
from moeflow.server.model_pool import ModelPool
from moeflow.server.served_model import Loadable, ModelSource
from moeflow.text.tokenizer import Tokenizer
from tests.server.fake_client import FakeClient

SIZES = {"a": 60, "b": 50, "c": 40, "huge": 0}  # of 100; 0: not known
PATH = "/secret/place"


@dataclass
class Fleet:
    """What the engines of all models did, and how they are to be."""

    tokenizer: Tokenizer
    app: FastAPI = field(init=False)
    engines: dict[str, FakeClient] = field(default_factory=dict)  # the newest of each model
    deaths: dict[str, Callable[[], None]] = field(default_factory=dict)  # to call when one dies for good
    history: list[str] = field(default_factory=list)
    problem: str = ""  # that keeps models from loading
    load_s: float = 0.0
    is_paused: bool = False  # whether engines stop after a token

    def source(self, name: str, path: str | None = None) -> ModelSource:
        async def load(on_failure: Callable[[], None]) -> Generator:
            self.history.append(f"+{name}")
            await asyncio.sleep(self.load_s)
            engine = self.engines[name] = Engine(self, name)
            engine.pause_after = 1 if self.is_paused else None
            self.deaths[name] = on_failure
            return Generator(engine, self.tokenizer)

        def prepare() -> Loadable:
            if self.problem:
                raise CapacityError(f"{PATH}/{name} {self.problem}")
            return Loadable(SIZES.get(name, 1), load)

        return ModelSource(name, path or f"{PATH}/{name}", prepare)

    @property
    def status(self) -> dict[str, str]:
        return {model.name: model.status for model in self.app.state.service.models.all}

    def go_on(self) -> None:
        for engine in self.engines.values():
            engine.pause_after = None


class Engine(FakeClient):
    def __init__(self, fleet: Fleet, name: str) -> None:
        super().__init__(fleet.tokenizer)
        self.model = msgspec.structs.replace(self.model, name=name)
        self.snapshot = EngineStats(generated_tokens_total=7)
        self._fleet = fleet

    async def shutdown(self, deadline_s: float) -> None:
        assert not self.live or deadline_s == 30.0, "a model that was at work has been unloaded"
        while self.live:
            await asyncio.sleep(0.002)
        self._fleet.history.append(f"-{self.model.name}")
        await super().shutdown(deadline_s)


def make_fleet(tokenizer: Tokenizer, *, max_queue: int = 64, api_key: str | None = None, **times) -> Fleet:
    fleet = Fleet(tokenizer)
    times = {"max_wait_s": 5.0, "patience_s": 5.0} | times
    sources = [fleet.source(name) for name in SIZES]
    pool = ModelPool(sources, max_queue=max_queue, budget_bytes=100, source_of=fleet.source, **times)
    fleet.app = create_app(None, ServerConfig(max_queue=max_queue, api_key=api_key), pool=pool)
    return fleet
