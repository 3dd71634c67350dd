"""Plans as tables."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from moeflow.bench.tables import Table
from moeflow.core.hardware import DEVICE, DISK, FAR_APART, PINNED, RAM
from moeflow.core.plan import DISK_OFFLOAD, RESIDENT, Estimate, Plan, plan_to_json
from moeflow.core.units import format_bytes, format_seconds
from moeflow.pipeline.catalog import PIPELINES

if TYPE_CHECKING:
    from moeflow.bench.plan_validation import CheckRow

_TIERS = {RAM: "memory", DEVICE: "device memory", DISK: "disk", PINNED: "pinned memory"}
_PIPELINES = {
    RESIDENT: "everything is resident",
    DISK_OFFLOAD: "experts are read from disk as they are needed",
    **{name: pipeline.summary for name, pipeline in PIPELINES.items()},
}
_RESOURCES = {"device": "the device", "disk": "the disk", "host": "the processor"}
_MAX_HELPS = 4
MIN_SHARE = 0.005  # of a step's time that is worth a word
_POLICY_COLUMNS = ("policy", "", "why")


def plan_tables(plan: Plan) -> list[Table]:
    """Return what was decided, what to expect, and what would help."""
    return [policy_table(plan), prediction_table(plan), *([helps_table(plan)] if plan.helps else [])]


def policy_table(plan: Plan) -> Table:
    """Return what was decided, and why: only what this machine has."""
    policy, reasons = plan.policy, dict(plan.reasons)
    rows = [("sequences at once (N)", f"{policy.batch_size}", reasons.get("batch_size", "").partition(": ")[2])]
    if _has_device(plan):
        micro_batches = f"{policy.num_micro_batches} of them a step" if policy.num_micro_batches > 1 else "all at once"
        rows.append(("micro-batch (mu)", f"{policy.micro_batch}", micro_batches))
    else:
        rows.append(("prompt tokens a pass", f"{policy.chunk_tokens}", ""))
    rows.append(("pipeline", plan.pipeline, _PIPELINES.get(plan.pipeline, "")))
    rows.append(("weights", plan.weight_format, reasons.get("weight_format", "")))
    if _has_device(plan):
        rows += _device_rows(plan)
    else:
        rows.append(("keys and values", plan.kv_dtype, f"{format_bytes(plan.kv_cache_bytes)} in memory"))
    rows += _expert_rows(plan)
    workload = plan.workload
    about = f"prompts of {workload.prompt_len} tokens, answers of {workload.gen_len}"
    if workload.rate:
        about += f", {workload.rate:g} requests/s"
    title = f"{short_name(plan.model)} on {plan.machine}, for {plan.goal}: {about}"
    return Table(title, _POLICY_COLUMNS, tuple(rows), words=(0, 1, 2))


def short_name(model: str) -> str:
    """Return what tells a model from others: a folder's or file's name, of a bare config that of its folder, too."""
    path = Path(model)
    return str(Path(*path.parts[-2:])) if path.name == "config.json" else path.name


def _device_rows(plan: Plan) -> Iterator[tuple[str, str, str]]:
    policy, reasons = plan.policy, dict(plan.reasons)
    yield "attention (A_g)", "device" if policy.attention_on_device else "host", reasons.get("attention_on_device", "")
    where = f"{policy.kv_on_device:.1%} on device" if policy.attention_on_device else "in memory"
    size = f"{format_bytes(plan.kv_cache_bytes)} of them"
    if policy.attention_on_device and policy.kv_on_device < 1:
        size += "; the rest comes from memory for each micro-batch"
    yield f"keys, values in {plan.kv_dtype} (r_c)", where, size
    stay = f"{policy.weights_on_device:.1%} on device"
    why = reasons.get("weights_on_device", "") if policy.weights_on_device < 1 else "all stay there"
    yield "layers' weights (r_w)", stay, why
    whose = "experts' computation (F_g)" if plan.expert_places else "feed-forward (F_g)"
    yield whose, "device", "always: no pipeline leaves all of it to the host"
    layout = "one device" if policy.num_devices == 1 else f"{policy.num_devices} devices"
    yield "parallel layout", layout, "" if policy.num_devices == 1 else "each has a part of every layer"


def _expert_rows(plan: Plan) -> Iterator[tuple[str, str, str]]:
    """Yield where experts live; the shares add up to all of them."""
    whys = {DEVICE: "they stay there", DISK: dict(plan.reasons).get("experts_on_disk", "")}
    if _has_device(plan):
        whys[RAM] = "they go to the device for each pass"
    used = [(tier, share) for tier, share in plan.expert_places if share > 0]
    for tier, share in used:
        yield f"experts in {_TIERS[tier]}" if tier != DISK else "experts on disk", f"{share:.1%}", whys.get(tier, "")


def _has_device(plan: Plan) -> bool:
    return any(used.tier == DEVICE for used in plan.memory)


def prediction_table(plan: Plan) -> Table:
    """Return what to expect, with intervals."""
    rows = [
        ("generated tokens/s, prefill included", *_numbers(plan.tokens_per_s)),
        ("decode tokens/s, all together", *_numbers(plan.decode_tokens_per_s)),
        ("prefill tokens/s", *_numbers(plan.prefill_tokens_per_s)),
        ("time to first token, alone", *_times(plan.time_to_first_token_s)),
        *_all_at_once(plan),
        ("time per token of a request", *_times(plan.time_per_token_s)),
    ]
    each = " of each device" if plan.policy.num_devices > 1 else ""
    for used in plan.memory:
        peak = used.peak_bytes
        name = f"peak {_TIERS[used.tier]}" + (each if used.tier == DEVICE else "")
        between = f"{format_bytes(peak.low)} to {format_bytes(peak.high)}"
        rows.append((f"{name}, of {format_bytes(used.capacity_bytes)}", format_bytes(peak.value), between))
    notes = [f"Decoding is bound by {plan.bottleneck}."]
    busy = [f"{_RESOURCES.get(name, f'the {name}')} {share:.0%}" for name, share in plan.busy if share >= MIN_SHARE]
    if len(busy) > 1:
        notes.append(f"Busy while a step is decoded: {', '.join(busy)} of the time.")
    measured = dict(plan.reasons).get("machine", "")
    if measured:
        notes.append(f"This machine was {measured}; --recalibrate measures it again.")
    spread = plan.tokens_per_s.high / plan.tokens_per_s.value
    if plan.machine_identity and spread >= 1 + FAR_APART:
        notes.append(f"The machine was busy while it was measured: its figures lay up to {spread:.1f} times apart.")
        notes.append("Measured again while nothing else runs (--recalibrate), predictions are closer.")
    return Table("Expected", ("", "value", "between"), tuple(rows), tuple(notes))


def _all_at_once(plan: Plan) -> Iterator[tuple[str, str, str]]:
    """Yield what a request waits for its first token that comes with all the others, as batch jobs' do."""
    number = plan.policy.batch_size
    if number > 1:
        yield f"the same, {number} prompts at once", *_times(plan.all_prompts_s)


def helps_table(plan: Plan) -> Table:
    """Return what more of a resource would bring, or a smaller format; best first."""
    what = "a step's speed" if plan.goal == "latency" else "generated tokens/s"
    rows = tuple((it.change, f"x{it.speedup:.2f}") for it in plan.helps[:_MAX_HELPS])
    return Table("What would help most, each planned anew", ("", what), rows)


def check_table(rows: Sequence[CheckRow]) -> Table:
    """Return what was predicted beside what was measured."""
    is_informed = any(row.informed is not None for row in rows)
    cells = []
    for row in rows:
        error = "" if row.informed_error is None else f"{row.informed_error:+.1%}"
        cell = (row.name, _measure(row.predicted, row.unit), _measure(row.measured, row.unit), f"{row.error:+.1%}")
        cells.append((*cell, error) if is_informed else cell)
    notes = ["Median error of speeds: " + f"{statistics.median(abs(row.error) for row in rows if is_speed(row)):.1%}."]
    if is_informed:
        known = statistics.median(abs(row.informed_error or 0.0) for row in rows if is_speed(row))
        notes.append(
            f"Knowing what is read: {known:.1%}. How often experts are needed again depends on model and text:"
        )
        notes.append("`moeflow generate --record-routing FILE` notes it, `moeflow plan --routing FILE` uses it.")
    columns = ("", "predicted", "measured", "error")
    return Table("Checked", (*columns, "knowing reads") if is_informed else columns, tuple(cells), tuple(notes))


def check_json(plan: Plan, rows: Sequence[CheckRow]) -> str:
    """Return the same as JSON, with the plan."""
    checked = [asdict(row) | {"error": round(row.error, 4), "informed_error": row.informed_error} for row in rows]
    return json.dumps({"plan": json.loads(plan_to_json(plan)), "checked": checked}, indent=1, allow_nan=False)


def is_speed(row: CheckRow) -> bool:
    """Say whether a row is tokens a second or a time to the first token."""
    return row.unit in ("tokens/s", "ms")


def _measure(value: float, unit: str) -> str:
    if unit == "ms":
        return format_seconds(value / 1000)
    return format_bytes(value) if unit == "bytes" else f"{_short(value)} {unit}"


def _numbers(estimate: Estimate) -> tuple[str, str]:
    return _short(estimate.value), f"{_short(estimate.low)} to {_short(estimate.high)}"


def _times(estimate: Estimate) -> tuple[str, str]:
    return format_seconds(estimate.value), f"{format_seconds(estimate.low)} to {format_seconds(estimate.high)}"


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
