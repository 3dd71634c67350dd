"""Plans as tables."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from moeflow.bench.tables import Table
from moeflow.core.hardware import DEVICE, DISK, PINNED, RAM
from moeflow.core.plan import DIRECT, FROM_DISK, Estimate, Plan, plan_to_json
from moeflow.core.units import format_bytes

if TYPE_CHECKING:
    from moeflow.bench.plan_check import CheckRow

_TIERS = {RAM: "memory", DEVICE: "device memory", DISK: "disk", PINNED: "pinned memory"}
_PIPELINES = {DIRECT: "direct: everything is resident", FROM_DISK: "streaming: experts come from disk"}


def policy_table(plan: Plan) -> Table:
    """Return what was decided, and why."""
    policy, reasons = plan.policy, dict(plan.reasons)
    has_device = any(used.tier == DEVICE for used in plan.memory)
    rows = [
        (
            "sequences that decode together (N)",
            f"{policy.batch_size}",
            reasons.get("batch_size", "").partition(": ")[2],
        ),
        ("pipeline", plan.pipeline, _PIPELINES.get(plan.pipeline, "").partition(": ")[2]),
        ("weights", plan.weight_format, reasons.get("weight_format", "")),
        ("keys and values", format_bytes(plan.kv_cache_bytes), f"in {plan.kv_dtype}"),
    ]
    if has_device:
        layout = "one device" if policy.num_devices == 1 else f"each layer over {policy.num_devices} devices"
        rows[1:1] = [
            ("micro-batch (mu)", f"{policy.micro_batch}", f"{policy.num_micro_batches} of them"),
            ("attention (A_g)", "device" if policy.attention_on_device else "host", reasons["attention_on_device"]),
            ("experts (F_g)", "device" if policy.ffn_on_device else "host", ""),
            (
                "weights on the device (r_w)",
                f"{policy.weights_on_device:.1%}",
                "the rest comes over the link each pass",
            ),
            ("keys and values on the device (r_c)", f"{policy.kv_on_device:.1%}", ""),
            ("parallel layout", layout, ""),
        ]
    else:
        rows.append(("prompt tokens a pass", f"{policy.chunk_tokens}", ""))
    if any(used.tier == DISK for used in plan.memory):
        rows.append(("experts on disk", f"{policy.experts_on_disk:.1%}", reasons.get("experts_on_disk", "")))
    workload = plan.workload
    asked = f"prompts of {workload.prompt_len} tokens, answers of {workload.gen_len}"
    return Table(f"{plan.model} on {plan.machine}, for {plan.goal}: {asked}", ("policy", "", "why"), tuple(rows), ())


def prediction_table(plan: Plan) -> Table:
    """Return what to expect, with intervals."""
    rows = [
        ("generated tokens/s, prefill included", *_numbers(plan.tokens_per_s)),
        ("decode tokens/s, all together", *_numbers(plan.decode_tokens_per_s)),
        ("prefill tokens/s", *_numbers(plan.prefill_tokens_per_s)),
        ("time to first token, ms", *_numbers(plan.time_to_first_token_s, 1000)),
        ("time per token of a request, ms", *_numbers(plan.time_per_token_s, 1000)),
    ]
    for used in plan.memory:
        peak = used.peak_bytes
        low, high = format_bytes(peak.low), format_bytes(peak.high)
        rows.append(
            (
                f"peak {_TIERS[used.tier]}, of {format_bytes(used.capacity_bytes)}",
                format_bytes(peak.value),
                f"{low} to {high}",
            )
        )
    notes = [f"Bottleneck of decoding: {plan.bottleneck}."]
    busy = [f"{name} {share:.0%}" for name, share in plan.busy if share > 0]
    if len(busy) > 1:
        notes.append(f"Busy, of the busiest: {', '.join(busy)}.")
    if plan.helps:
        notes.append(
            "What would help most: " + "; ".join(f"{it.change}, x{it.speedup:.2f}" for it in plan.helps[:4]) + "."
        )
    return Table("expected", ("", "value", "between"), tuple(rows), tuple(notes))


def check_table(rows: Sequence[CheckRow]) -> Table:
    """Return what was predicted beside what was measured."""
    cells = [
        (row.name, _measure(row.predicted, row.unit), _measure(row.measured, row.unit), f"{row.error:+.1%}")
        for row in rows
    ]
    note = "Median error of speeds: " + f"{statistics.median(abs(row.error) for row in rows if is_speed(row)):.1%}."
    return Table("checked", ("", "predicted", "measured", "error"), tuple(cells), (note,))


def check_json(plan: Plan, rows: Sequence[CheckRow]) -> str:
    """Return the same as JSON, with the plan."""
    checked = [asdict(row) | {"error": round(row.error, 4)} for row in rows]
    return json.dumps({"plan": json.loads(plan_to_json(plan)), "checked": checked}, indent=1, allow_nan=False)


def is_speed(row: CheckRow) -> bool:
    """Say whether a row is tokens a second or a time to the first token."""
    return row.unit in ("tokens/s", "ms")


def _measure(value: float, unit: str) -> str:
    return format_bytes(value) if unit == "bytes" else f"{_short(value)} {unit}"


def _numbers(estimate: Estimate, factor: float = 1.0) -> tuple[str, str]:
    value, low, high = (_short(number * factor) for number in (estimate.value, estimate.low, estimate.high))
    return value, f"{low} to {high}"


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
