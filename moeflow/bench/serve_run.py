"""`bench serve` as a whole: the same traffic for each policy and rate, alternately, against engines or a server.

Each policy has an engine in a process of its own, started anew for every repetition. So a drift of the machine hits all
alike, and only one model is in memory at a time.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from moeflow.bench.http_target import HttpTarget
from moeflow.bench.metrics import Served, summarize
from moeflow.bench.replay import EngineTarget, ReplayTarget, replay
from moeflow.core.engine_config import EngineConfig
from moeflow.core.errors import ConfigError
from moeflow.processes.process_client import ProcessEngine
from moeflow.speculation.names import short_names
from moeflow.workload.poisson import WorkloadSpec, make_arrivals

NUM_WARM_UP = 4  # requests before the first that counts
WARM_UP_SEED = -1
SHUTDOWN_S = 1.0
SERVERS = "servers, over HTTP"  # in place of a model's name: a server's engine is its own business


@dataclass(frozen=True, slots=True)
class RunCalls:
    """What to call while it runs."""

    on_bytes: Callable[[int, int], None]  # while a model is loaded
    on_run: Callable[[str], None]  # when a measurement begins; names it
    on_result: Callable[[dict[str, Any]], None]  # the fields of a record, when it has ended
    on_request: Callable[[], None] = lambda: None  # when a request has ended


@dataclass(frozen=True, slots=True)
class Sweep:
    """Traffic to make: a spec, but with several rates, several times."""

    spec: WorkloadSpec  # its rate is not used
    rates: Sequence[float]
    repeats: int

    @property
    def num_runs(self) -> int:
        """How often traffic is made for one policy."""
        return len(self.rates) * self.repeats

    def at(self, rate: float, repetition: int) -> WorkloadSpec:
        """Return the traffic of one run; another repetition has other lengths and gaps."""
        return dataclasses.replace(self.spec, rate=rate, seed=self.spec.seed + repetition)

    def warm_up(self) -> WorkloadSpec:
        """Return a little traffic that does not count."""
        return dataclasses.replace(self.spec, rate=100.0, num_requests=NUM_WARM_UP, seed=WARM_UP_SEED)


def with_policy(config: EngineConfig, policy: str, *, max_prompt: int, batch_timeout_s: float) -> EngineConfig:
    """Return the engine's configuration under a policy. The static one prefills its whole batch in one pass."""
    scheduler = dataclasses.replace(config.scheduler, policy=policy, batch_timeout_s=batch_timeout_s)
    if policy == "static":
        num_tokens = scheduler.max_num_seqs * max_prompt
        scheduler = dataclasses.replace(
            scheduler, max_num_batched_tokens=max(num_tokens, scheduler.max_num_batched_tokens)
        )
    return dataclasses.replace(config, scheduler=scheduler)


def on_and_off(configs: Sequence[EngineConfig]) -> list[EngineConfig]:
    """Return each configuration without speculators, too, just before it; static batches never have drafts."""
    found: list[EngineConfig] = []
    for config in configs:
        plain = dataclasses.replace(config, speculators=(), draft_models=())
        found += [plain] if plain == config or config.scheduler.policy == "static" else [plain, config]
    return found


def system_name(config: EngineConfig) -> str:
    """Return the label of an engine within a sweep: its policy and its speculators."""
    return ", ".join((config.scheduler.policy, *short_names(config.speculators).values()))


async def run_engines(configs: Sequence[EngineConfig], sweep: Sweep, progress: RunCalls) -> None:
    """Measure engines, one configuration after the other.

    Raises: ConfigError if a request of the traffic could never run; what starting an engine raises.
    """
    for repetition in range(sweep.repeats):
        for config in configs:
            _check_length(sweep.spec, config.scheduler.max_model_len)
            engine = await ProcessEngine.start(config, on_progress=progress.on_bytes)
            try:
                await replay(EngineTarget(engine), make_arrivals(sweep.warm_up()), lambda: None)
                about = {**describe(config), "model": engine.model.name, "system": system_name(config)}
                await _run(EngineTarget(engine), about, sweep, repetition, progress)
            finally:
                await engine.shutdown(SHUTDOWN_S)


async def run_server(target: HttpTarget, name: str, sweep: Sweep, progress: RunCalls) -> None:
    """Measure a server that runs already. `name` is the served model's, which tells servers apart."""
    await replay(target, make_arrivals(sweep.warm_up()), lambda: None)
    about = {"model": SERVERS, "weight_format": None, "device": None, "system": name}
    for repetition in range(sweep.repeats):
        await _run(target, about, sweep, repetition, progress)


async def _run(target: ReplayTarget, about: dict[str, Any], sweep: Sweep, repetition: int, progress: RunCalls) -> None:
    for rate in sweep.rates:
        spec = sweep.at(rate, repetition)
        progress.on_run(f"{about['system']}, {rate:g} requests/s")
        served = await replay(target, make_arrivals(spec), progress.on_request)
        progress.on_result({**about, "repetition": repetition, **result(spec, served)})


def result(spec: WorkloadSpec, served: Sequence[Served]) -> dict[str, Any]:
    """Return the fields of a record: the traffic, its criteria, and each request."""
    errors = Counter(each.error for each in served if each.error is not None)
    return {
        "workload": dataclasses.asdict(spec),
        "rate": spec.rate,
        "summary": summarize(served),
        "errors": dict(errors.most_common(5)),
        "requests": {
            "at_s": [round(each.at_s, 4) for each in served],
            "prompt": [each.num_prompt for each in served],
            "new": [each.num_new for each in served],
            "first_s": [None if each.first_s is None else round(each.first_s - each.at_s, 4) for each in served],
            "latency_s": [None if each.error else round(each.latency_s, 4) for each in served],
        },
    }


def describe(config: EngineConfig) -> dict[str, Any]:
    """Return what a reader must know of an engine."""
    limits = config.scheduler
    return {
        "weight_format": config.weight_format,
        "speculators": list(short_names(config.speculators).values()),
        "instruction_set": config.cpu_isa,
        "kv_dtype": config.kv_dtype,
        "device": config.device,
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "kv_capacity_tokens": limits.num_blocks * limits.block_size,
        "batch_timeout_s": limits.batch_timeout_s if limits.policy == "static" else None,
    }


def check_server(spec: WorkloadSpec, max_model_len: int | None) -> None:
    """Raises: ConfigError if the server would refuse the longest request."""
    if max_model_len is not None:
        _check_length(spec, max_model_len)


def _check_length(spec: WorkloadSpec, max_model_len: int) -> None:
    if spec.max_total > max_model_len:
        raise ConfigError(
            f"requests have up to {spec.max_total} tokens ({spec.max_prompt} + {spec.max_new}), but the engine allows "
            f"{max_model_len}: lower --max-prompt or --max-new, or raise --max-model-len"
        )
