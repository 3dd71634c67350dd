"""What would make a served model faster, each change planned anew for this machine; best first.

Options are planned completely, with `plan_for_start`'s rules. Other machines are the planner's `sensitivity.helps`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

import msgspec

from moeflow.core.errors import MoeflowError
from moeflow.core.hardware import RAM
from moeflow.core.plan import Forecast, Plan
from moeflow.core.units import format_bytes
from moeflow.kernels.weight_format import BITS_PER_VALUE, SUGGESTED_FORMATS
from moeflow.planner.hardware.host import HostResources, host_resources
from moeflow.planner.host_forecast import MachineOf
from moeflow.planner.planning import machine_now
from moeflow.planner.resolve import Resolved, resolve
from moeflow.planner.search import sensitivity
from moeflow.planner.search.sensitivity import MIN_HELP
from moeflow.planner.served.command_line import option_text, serve_command
from moeflow.planner.usage import SERVING, Usage
from moeflow.settings.settings import Settings, from_plain

_FORMAT_IN_TEXT: Final = "(--quantize "  # of a change that is planned completely instead
_OPTION_IN_TEXT: Final = re.compile(r" \((--[a-z-]+(?: \S+)?)\)$")

Kind = Literal["option", "batch", "machine"]


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """A change, and what the planner expects of it. Speedups compare with the plan as it is."""

    kind: Kind  # a setting; more requests at once; other hardware
    change: str  # "weights in int8"
    option: str = ""  # "--quantize int8"; empty: it is none
    command: str = ""  # that serves the model so; empty: no command does it
    speedup_alone: float | None = None  # of one request's decoding; None: not predicted
    speedup_full: float | None = None  # of all requests at once
    alone_tokens_per_s: float | None = None
    full_tokens_per_s: float | None = None
    memory_bytes: int | None = None  # at the peak; None: as now

    @property
    def gain(self) -> float:
        """The larger speedup."""
        return max(self.speedup_alone or 0.0, self.speedup_full or 0.0)

    @property
    def costs_more(self) -> bool:
        """Whether it slows one request by more than it speeds up many, or the other way round."""
        return (self.speedup_alone or 1.0) * (self.speedup_full or 1.0) < 1.0


def advise(plan: Plan, model: str) -> list[Advice]:
    """Return what would help, with commands that serve the model of that name; empty: the built-in one.

    Blocks: for some seconds. Measures kernels of smaller formats, once, so nothing else should be at work.
    Raises: MoeflowError if the plan cannot be decided again.
    """
    settings = from_plain(plan.settings)
    usage = dataclasses.replace(SERVING, workload=plan.workload, goal=plan.goal)
    planner = _Planner(settings, usage, _resources(plan, settings), model)
    now = planner.resolved(settings)
    if now.plan.forecast is None:
        return []
    found = [*planner.options(now.plan, now.plan.forecast), *_batches(now.plan.forecast), *_machines(now, usage)]
    return sorted((it for it in found if it.gain >= MIN_HELP and not it.costs_more), key=lambda it: -it.gain)


@dataclasses.dataclass(frozen=True)
class _Planner:
    """Plans for the machine as it was when the server started."""

    settings: Settings
    usage: Usage
    resources: HostResources
    model: str  # its name in commands

    def resolved(self, settings: Settings) -> Resolved:
        machine_of: MachineOf = machine_now(settings, self.resources, is_apart=False)
        return resolve(settings, self.usage, machine_of=machine_of, resources=self.resources)

    def options(self, plan: Plan, now: Forecast) -> Iterator[Advice]:
        """Yield what settings that the user left open, or a larger limit of memory, would bring."""
        for change, values in self._variants(plan, now):
            settings = dataclasses.replace(self.settings, **values)
            try:
                other = self.resolved(settings).plan.forecast
            except MoeflowError:  # not for this model, or on this machine
                continue
            if other is None:
                continue
            yield Advice(
                kind="option",
                change=change,
                option=" ".join(option_text(name, value) for name, value in values.items()),
                command=serve_command(settings, self.model),
                speedup_alone=other.decode_alone_tokens_per_s.value / now.decode_alone_tokens_per_s.value,
                speedup_full=other.decode_tokens_per_s.value / now.decode_tokens_per_s.value,
                alone_tokens_per_s=other.decode_alone_tokens_per_s.value,
                full_tokens_per_s=other.decode_tokens_per_s.value,
                memory_bytes=_peak_bytes(other),
            )

    def _variants(self, plan: Plan, now: Forecast) -> Iterator[tuple[str, Mapping[str, Any]]]:
        if self.settings.quantize is None and not plan.config.layer_formats:
            bits = BITS_PER_VALUE.get(plan.config.weight_format, 16.0)
            for name in SUGGESTED_FORMATS:
                if BITS_PER_VALUE.get(name, 0.0) < bits:
                    yield f"weights in {name}", {"quantize": name}
        limit_bytes = self.settings.memory_bytes
        if limit_bytes is not None and now.policy.experts_on_disk:
            most = min(2 * limit_bytes, self.resources.total_bytes)
            yield f"a memory limit of {format_bytes(most)}", {"memory_bytes": most}


def _resources(plan: Plan, settings: Settings) -> HostResources:
    """Return the resources that the plan was made with: what its engines hold by now was free then."""
    here = host_resources(settings.device, settings.cache_dir)
    tiers = () if plan.forecast is None else plan.forecast.memory
    planned = next((it.capacity_bytes for it in tiers if it.tier == RAM), 0)
    return dataclasses.replace(here, available_bytes=max(here.available_bytes, planned, plan.memory_bytes))


def _batches(now: Forecast) -> Iterator[Advice]:
    """Yield what the full batch brings over one request."""
    number = now.policy.batch_size
    if number > 1:
        yield Advice(
            kind="batch",
            change=f"{number} requests at once",
            speedup_full=now.decode_tokens_per_s.value / now.decode_alone_tokens_per_s.value,
            full_tokens_per_s=now.decode_tokens_per_s.value,
        )


def _machines(now: Resolved, usage: Usage) -> Iterator[Advice]:
    """Yield what other hardware or more processes would bring."""
    estimator, forecast = now.estimator, now.plan.forecast
    assert estimator is not None, "it made the forecast"
    assert forecast is not None, "the caller has looked"
    model = estimator.costs(usage.workload)
    if model.has_device:
        return  # the full plan searches pipelines for that: `moeflow plan`
    objective = usage.objective(estimator.memory_limits)
    alone = dataclasses.replace(objective, goal="latency", num_sequences=1)
    speedups = {
        name: {it.change: it.speedup for it in sensitivity.helps(model, each)}
        for name, each in (("alone", alone), ("full", objective))
    }
    for change in dict.fromkeys((*speedups["alone"], *speedups["full"])):
        if _FORMAT_IN_TEXT in change:
            continue
        yield Advice(
            kind="machine",
            change=_OPTION_IN_TEXT.sub("", change),
            option=match[1] if (match := _OPTION_IN_TEXT.search(change)) else "",
            speedup_alone=speedups["alone"].get(change),
            speedup_full=speedups["full"].get(change),
        )


def _peak_bytes(forecast: Forecast) -> int | None:
    return next((round(it.peak_bytes.value) for it in forecast.memory if it.tier == RAM), None)
