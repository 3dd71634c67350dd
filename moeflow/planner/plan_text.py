"""A plan in a line, for people who wait for the engine to start."""

from __future__ import annotations

from typing import Final

from moeflow.core.hardware import RAM
from moeflow.core.plan import Plan
from moeflow.core.units import format_bytes

HINT: Final = "the speed is unknown: `moeflow plan` measures this machine in about twenty seconds"


def what_to_expect(plan: Plan) -> str:
    """Return a line: speed, time to first token and memory, and how reliable that is; empty if nothing is known."""
    if plan.forecast is None:
        return ""
    reasons = dict(plan.reasons)
    whys = (reasons[name] for name in ("experts_on_disk", "machine") if name in reasons)
    return "; ".join([f"Estimate: {speed_and_memory(plan)}", *whys])


def speed_and_memory(plan: Plan) -> str:
    """Return the expected speed, time to first token and memory of a plan that has a forecast."""
    forecast = plan.forecast
    assert forecast is not None
    speeds = f"{_rounded(forecast.decode_alone_tokens_per_s.value)} tokens/s for one request"
    if (number := forecast.policy.batch_size) > 1:
        engines = plan.num_replicas if plan.node_replicas is None else plan.node_replicas.number
        replicas = f"{engines} x " if engines > 1 else ""
        speeds += f", {_rounded(forecast.decode_tokens_per_s.value)} for {replicas}{number} concurrent ones"
    first_s = forecast.time_to_first_token_s.value
    return f"{speeds}; first token of a {plan.workload.prompt_len}-token prompt after {first_s:.2g} s; {_memory(plan)}"


def _memory(plan: Plan) -> str:
    if plan.config.memory is not None:
        return f"memory at most {format_bytes(plan.config.memory.limit_bytes)}"
    assert plan.forecast is not None
    used = next(it for it in plan.forecast.memory if it.tier == RAM)
    return f"memory about {format_bytes(int(used.peak_bytes.value))}"


def _rounded(number: float) -> str:
    """Return a number with two digits that count: more would promise too much."""
    return f"{float(f'{number:.2g}'):g}" if number < 100 else f"{round(number, -1):.0f}"
