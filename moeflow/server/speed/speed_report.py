"""What is known of a model's speed, as `GET /stats/speed` answers it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import UTC, datetime

import msgspec

from moeflow.core.engine_messages import EngineStats
from moeflow.core.hardware import DISK, RAM, Machine
from moeflow.core.observation import PassGroup
from moeflow.core.plan import Estimate, Forecast, Plan
from moeflow.planner.costs.roofline import processor_of
from moeflow.planner.hardware.this_machine import how_measured, was_disturbed
from moeflow.planner.served.operating_point import (
    OperatingPoint,
    compute_level,
    decoding_point,
    operating_point,
    pass_work,
)
from moeflow.planner.served.served_estimate import ServedEstimate
from moeflow.server.speed.measured import Measured, PassKind, mean_context, mean_step_s
from moeflow.server.speed.memory_use import MemoryUse, memory_use
from moeflow.server.speed.other_programs import OtherPrograms
from moeflow.server.speed.own_processes import own_processes
from moeflow.server.speed.speed_objects import (
    Comparison,
    Figure,
    Mark,
    MeasuredFigure,
    Memory,
    ModelCost,
    Now,
    Planned,
    Point,
    Roofs,
    TrailPoint,
)

KINDS: tuple[PassKind, PassKind] = ("decode", "prompts")
_NO_PASS = "no pass in the last minute"
_NO_ENGINE = "no engine answers"
_SHARED = "experts or layers are shared with a device: one roof does not hold for both"


class Report(msgspec.Struct, frozen=True):
    """Parts of the answer that need the model's shape."""

    model: ModelCost
    roofs: Roofs
    now: Now
    trail: list[TrailPoint]
    marks: list[Mark]
    predicted: list[Comparison]
    memory: Memory


def report(
    estimate: ServedEstimate, measured: Measured, stats: EngineStats, others: OtherPrograms, *, is_only_model: bool
) -> Report:
    """Return these parts. Blocks: for some milliseconds, so it is for a thread.

    `is_only_model`: the memory of the server's processes is this model's.
    """
    processes = own_processes()
    memory = memory_use(estimate, stats, processes)
    return Report(
        model=_model(estimate),
        roofs=_roofs(estimate),
        now=_now(estimate, measured, others.look(processes)),
        trail=_trail(estimate, measured),
        marks=_marks(estimate),
        predicted=_comparisons(estimate, measured, stats, memory if is_only_model else None),
        memory=Memory(**msgspec.structs.asdict(memory)),
    )


def _now(estimate: ServedEstimate, measured: Measured, other_programs: float | None) -> Now:
    points: dict[str, Point | None] = dict.fromkeys(KINDS)
    for kind in KINDS:
        groups, num_engines = measured.now(kind)
        if groups:
            points[kind] = _point(operating_point(estimate, groups, num_engines))
    unknown = "" if any(points.values()) else _NO_PASS if measured.sights else _NO_ENGINE
    return Now(
        decode=points["decode"],
        prompts=points["prompts"],
        observed_s=measured.observed_s,
        other_programs=other_programs,
        unknown=unknown,
    )


def _model(estimate: ServedEstimate) -> ModelCost:
    costs, config = estimate.costs, estimate.plan.config
    one = PassGroup(num_tokens=1, num_sampled=1, num_sequences=1, age_s=0.0, num_passes=1)
    work = pass_work(costs, None, one, float(costs.shape.routing.top_k))
    return ModelCost(
        name=config.model_name,
        weight_format=config.weight_format,
        active_bytes_per_token=work.num_bytes,
        flops_per_token=work.num_flops,
        kv_bytes_per_token=costs.kv_bytes,
        resident_bytes=costs.model_bytes,
    )


def _roofs(estimate: ServedEstimate) -> Roofs:
    machine, level = estimate.machine, compute_level(estimate)
    if machine is None or level is None:
        return Roofs(
            level=None,
            processor=None,
            num_devices=0,
            memory_bytes_per_s=None,
            disk_bytes_per_s=None if machine is None else _disk(machine),
            flops_per_s={},
            weights_roof=None,
            source="",
            measured_at="",
            age_s=None,
            uncertainty=None,
            is_disturbed=False,
            unknown=estimate.why_no_machine or _SHARED,
        )
    number = max(machine.num_devices, 1) if level.name != RAM else 1
    processor = processor_of(level)
    return Roofs(
        level=level.name,
        processor=processor.name,
        num_devices=number if level.name != RAM else 0,
        memory_bytes_per_s=number * level.read_bytes_per_s,
        disk_bytes_per_s=_disk(machine),
        flops_per_s={dtype: number * flops for dtype, flops in processor.peak_flops_per_s},
        weights_roof=processor.peak_format(estimate.costs.formats.matrices),
        source=how_measured(machine),
        measured_at=machine.measured_at,
        age_s=_age_s(machine.measured_at),
        uncertainty=machine.uncertainty,
        is_disturbed=was_disturbed(machine),
        unknown="",
    )


def _disk(machine: Machine) -> float | None:
    return machine.link(DISK, RAM).peak_bytes_per_s if machine.has(DISK) else None


def _age_s(measured_at: str) -> float | None:
    """Return the age of a measurement; None: it has no date."""
    try:
        then = datetime.fromisoformat(measured_at)
    except ValueError:
        return None
    then = then if then.tzinfo is not None else then.replace(tzinfo=UTC)
    return max(time.time() - then.timestamp(), 0.0)


def _point(it: OperatingPoint) -> Point:
    return Point(
        age_s=it.age_s,
        num_passes=it.num_passes,
        num_engines=it.num_engines,
        pass_s=it.pass_s,
        tokens_per_pass=it.tokens_per_pass,
        sequences_per_pass=it.sequences_per_pass,
        generated_per_s=it.generated_per_s,
        context=it.context,
        distinct_experts=it.distinct_experts,
        expected_experts=it.expected_experts,
        bytes_per_pass=it.work.num_bytes,
        flops_per_pass=it.work.num_flops,
        disk_bytes_per_pass=it.disk_bytes,
        stall_s=it.stall_s,
        waited_s=it.waited_s,
        intensity=it.intensity,
        flops_per_s=it.flops_per_s,
        bytes_per_s=it.bytes_per_s,
        roof_pass_s=it.roof_s,
        share_of_roof=it.share_of_roof,
        binds=it.bound,
    )


def _trail(estimate: ServedEstimate, measured: Measured) -> list[TrailPoint]:
    found = []
    for kind in KINDS:
        for groups, num_engines in measured.trail(kind):
            it = operating_point(estimate, groups, num_engines)
            found.append(TrailPoint(age_s=it.age_s, kind=kind, intensity=it.intensity, flops_per_s=it.flops_per_s))
    return sorted(found, key=lambda it: -it.age_s)


def _marks(estimate: ServedEstimate) -> list[Mark]:
    forecast, context = estimate.plan.forecast, estimate.plan.workload.mean_context
    if forecast is None:
        return []
    steps = {
        1: 1 / forecast.decode_alone_tokens_per_s.value,
        forecast.policy.batch_size: forecast.time_per_token_s.value,
    }
    points = {number: decoding_point(estimate, number, context, step_s) for number, step_s in steps.items()}
    return [
        Mark(
            num_sequences=number,
            context=context,
            intensity=it.intensity,
            flops_per_s=it.flops_per_s,
            tokens_per_s=it.generated_per_s,
        )
        for number, it in points.items()
    ]


def _comparisons(
    estimate: ServedEstimate, measured: Measured, stats: EngineStats, memory: MemoryUse | None
) -> list[Comparison]:
    return [
        _decoding("alone_tokens_per_s", estimate, measured, 1),
        _decoding("full_tokens_per_s", estimate, measured, measured.largest_batch),
        _first_token(estimate, measured),
        _memory(estimate, stats, memory),
    ]


def _decoding(figure: Figure, estimate: ServedEstimate, measured: Measured, number: int) -> Comparison:
    """Compare the speed of steps of so many sequences; 0: none were measured."""
    groups = measured.plain_decoding(number) if number else []
    if not groups:
        unknown = "no pass in the last minute decoded "
        unknown += "for one request alone" if number else "for several requests at once"
        return _compared(figure, estimate, None, None, unknown)
    context, step_s = mean_context(groups), mean_step_s(groups)
    expected_s = estimate.step_s(number, context)
    found = MeasuredFigure(
        value=number / step_s,
        num_sequences=number,
        num_tokens=round(context),
        num_passes=sum(it.num_passes for it in groups),
        age_s=min(it.age_s for it in groups),
    )
    return _compared(figure, estimate, found, None if expected_s is None else number / expected_s)


def _first_token(estimate: ServedEstimate, measured: Measured) -> Comparison:
    first = measured.first_token
    if first is None:
        unknown = "no request without others got its first token in the last minute"
        return _compared("first_token_s", estimate, None, None, unknown)
    found = MeasuredFigure(
        value=first.seconds, num_sequences=1, num_tokens=first.num_computed_tokens, num_passes=1, age_s=first.age_s
    )
    return _compared("first_token_s", estimate, found, estimate.first_token_s(first.num_computed_tokens))


def _memory(estimate: ServedEstimate, stats: EngineStats, memory: MemoryUse | None) -> Comparison:
    if memory is None:
        unknown = "several models are loaded, and share the server's processes"
        return _compared("memory_bytes", estimate, None, None, unknown)
    num_tokens = (stats.kv_blocks_used + stats.kv_blocks_cached) * estimate.plan.config.scheduler.block_size
    found = MeasuredFigure(
        value=memory.used_bytes, num_sequences=stats.num_running, num_tokens=num_tokens, num_passes=0, age_s=0.0
    )
    return _compared("memory_bytes", estimate, found, estimate.memory_bytes(num_tokens))


def _compared(
    figure: Figure,
    estimate: ServedEstimate,
    measured: MeasuredFigure | None,
    expected: float | None,
    unknown: str = "",
) -> Comparison:
    planned = None if estimate.plan.forecast is None else _planned(figure, estimate.plan, estimate.plan.forecast)
    error = 100 * (expected / measured.value - 1) if expected is not None and measured is not None else None
    why = unknown or ("" if expected is not None else estimate.why_no_estimator)
    return Comparison(
        figure=figure, planned=planned, measured=measured, expected=expected, error_percent=error, unknown=why
    )


def _planned(figure: Figure, plan: Plan, forecast: Forecast) -> Planned | None:
    number = forecast.policy.batch_size * plan.num_replicas
    peak = next((it.peak_bytes for it in forecast.memory if it.tier == RAM), None)
    found: Mapping[Figure, tuple[Estimate | None, int]] = {
        "alone_tokens_per_s": (forecast.decode_alone_tokens_per_s, 1),
        "full_tokens_per_s": (forecast.decode_tokens_per_s, number),
        "first_token_s": (forecast.time_to_first_token_s, 1),
        "memory_bytes": (peak, number),
    }
    value, num_sequences = found[figure]
    if value is None:
        return None
    return Planned(
        value=value.value,
        low=value.low,
        high=value.high,
        num_sequences=num_sequences,
        prompt_len=plan.workload.prompt_len,
        gen_len=plan.workload.gen_len,
    )
