"""Plans as tables."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from moeflow.bench.tables import Table
from moeflow.checkpoint.gguf.file_names import whole_name
from moeflow.core.hardware import DEVICE, DISK, FAR_APART, PINNED, RAM
from moeflow.core.plan import DISK_OFFLOAD, HYBRID, RESIDENT, Estimate, Forecast, Plan, Sensitivity, plan_to_json
from moeflow.core.units import format_bytes, format_seconds
from moeflow.pipeline.catalog import PIPELINES
from moeflow.planner.search.objective import WHY_SO_MANY

if TYPE_CHECKING:
    from moeflow.bench.plan_validation import CheckRow

_TIERS = {RAM: "memory", DEVICE: "device memory", DISK: "disk", PINNED: "pinned memory"}
_NO_STREAM = {
    RESIDENT: "everything is resident",
    HYBRID: "the device computes some experts of a layer, and the processor the others at the same time",
    DISK_OFFLOAD: "experts are read from disk as they are needed",
}
_WHERE_EXPERTS = {
    RESIDENT: ("device", "where their weights stay"),
    HYBRID: ("device and host", "each where its weights stay"),
}
_STREAMED = ("device", "weights go there; with --device cpu the host computes all")
_ON_HOST = ("host", "their weights stay there")
_RESOURCES = {"device": "the device", "disk": "the disk", "host": "the processor"}
_MAX_HELPS = 8
MIN_SHARE = 0.005  # of a step's time that is worth a word
_POLICY_COLUMNS = ("policy", "", "why")


def plan_tables(plan: Plan) -> list[Table]:
    """Return the decisions, the forecast, and possible improvements."""
    tables = [policy_table(plan)]
    if plan.forecast is not None:
        tables.append(prediction_table(plan, plan.forecast))
        tables += [helps_table(plan.goal, plan.forecast.helps)] if plan.forecast.helps else []
    return tables


def forecast_of(plan: Plan) -> Forecast:
    """Return what a plan is expected to bring, where that is known."""
    assert plan.forecast is not None, "plans are made for machines whose speed is known"
    return plan.forecast


def _why(plan: Plan, name: str) -> str:
    """Return the reason for a choice, without the choice itself."""
    reason = dict(plan.reasons).get(name, "")
    return reason.partition(": ")[2] or reason


def _set_by(option: str, why: str) -> str:
    """Return the reason for a choice, with the option that sets it."""
    return f"{why} ({option})" if why else option


def policy_table(plan: Plan) -> Table:
    """Return the decisions and their reasons, for this machine's resources only."""
    config, limits = plan.config, plan.config.scheduler
    why = _set_by("--max-num-seqs", _why(plan, "max_num_seqs") or WHY_SO_MANY[plan.goal])
    rows = [("sequences at once (N)", f"{limits.max_num_seqs}", why)]
    if config.offload is not None and plan.forecast is not None:
        number = plan.forecast.policy.num_micro_batches
        micro_batches = f"{number} of them a step" if number > 1 else "all at once"
        rows.append(("micro-batch (mu)", f"{config.offload.micro_batch_tokens}", micro_batches))
        prompts = plan.forecast.policy.prompts
        at_once = f"{prompts} prompts at once" if prompts > 1 else "one prompt after another"
        rows.append(("micro-batch of prompts", f"{config.offload.prompt_micro_batch_tokens} tokens", at_once))
    else:
        why = _set_by("--max-num-batched-tokens", _why(plan, "max_num_batched_tokens"))
        rows.append(("tokens a pass", f"{limits.max_num_batched_tokens}", why))
    if why := _why(plan, "device"):
        rows.insert(0, ("device", config.device if config.offload is None else config.offload.torch_device, why))
    if plan.num_replicas > 1:
        rows.append(("replicas", f"{plan.num_replicas}", _why(plan, "replicas")))
    if plan.node_replicas is not None:
        rows.append(("replicas", f"{plan.node_replicas.number}", _why(plan, "other machines")))
    rows.append(("pipeline", plan.pipeline, _summary(plan.pipeline)))
    if why := dict(plan.reasons).get("pipelines tried", ""):
        rows.append(("configurations tried", why.partition(" ")[0], _why(plan, "pipelines tried")))
    rows.append(("weights", config.weight_format, _why(plan, "weights")))
    if _has_device(plan):
        rows += _device_rows(plan)
    else:
        kv_memory = "memory" if config.device == "cpu" else "device memory"
        rows.append(("KV cache", config.kv_dtype, f"{format_bytes(config.kv_cache_bytes)} in {kv_memory}"))
    if why := _why(plan, "work space"):
        rows.append(("work space", "device memory", why))
    rows += _expert_rows(plan)
    rows += _remote_rows(plan)
    rows += _rank_rows(plan)
    rows += _speculator_rows(plan)
    workload = plan.workload
    about = f"prompts of {workload.prompt_len} tokens, answers of {workload.gen_len}"
    if workload.rate:
        about += f", {workload.rate:g} requests/s"
    title = f"{short_name(plan.config.model_path)} on {plan.machine}, for {plan.goal}: {about}"
    return Table(title, _POLICY_COLUMNS, tuple(rows), words=(0, 1, 2))


def short_name(model: str) -> str:
    """Return what tells a model from others: a folder's or file's name, of a bare config that of its folder, too."""
    path = Path(model)
    return str(Path(*path.parts[-2:])) if path.name == "config.json" else whole_name(path.name)


def _device_rows(plan: Plan) -> Iterator[tuple[str, str, str]]:
    policy, reasons = forecast_of(plan).policy, dict(plan.reasons)
    yield "attention (A_g)", "device" if policy.attention_on_device else "host", reasons.get("attention_on_device", "")
    where = f"{policy.kv_on_device:.1%} on device" if policy.attention_on_device else "in memory"
    size = f"{format_bytes(plan.config.kv_cache_bytes)} of them"
    if policy.attention_on_device and policy.kv_on_device < 1:
        size += "; the rest comes from memory for each micro-batch"
    yield f"keys, values in {plan.config.kv_dtype} (r_c)", where, size
    stay = f"{policy.weights_on_device:.1%} on device"
    why = reasons.get("weights_on_device", "") if policy.weights_on_device < 1 else "all stay there"
    yield "layers' weights (r_w)", stay, why
    whose = "experts' computation (F_g)" if forecast_of(plan).expert_places else "feed-forward (F_g)"
    where, why = _WHERE_EXPERTS.get(plan.pipeline, _STREAMED if policy.ffn_on_device else _ON_HOST)
    if policy.ffn_on_device and policy.experts_on_host:
        where, why = "device and host", f"the host computes {policy.experts_on_host:.1%} of them"
    yield whose, where, why
    if plan.config.offload is not None:
        yield "tokens a pass", str(plan.config.scheduler.max_num_batched_tokens), "at most; prompts fill a pass"
    layout = "one device" if policy.num_devices == 1 else f"{policy.num_devices} devices"
    yield "parallel layout", layout, reasons.get("parallel degrees", "")


def _expert_rows(plan: Plan) -> Iterator[tuple[str, str, str]]:
    """Yield where experts live; the shares add up to all of them."""
    whys = {DEVICE: "they stay there", DISK: dict(plan.reasons).get("experts_on_disk", "")}
    if _has_device(plan):
        whys[RAM] = _host_experts(plan)
    places = () if plan.forecast is None else plan.forecast.expert_places
    used = [(tier, share) for tier, share in places if share > 0]
    for tier, share in used:
        yield f"experts in {_TIERS[tier]}" if tier != DISK else "experts on disk", f"{share:.1%}", whys.get(tier, "")


def _host_experts(plan: Plan) -> str:
    """Return how a machine with a device uses experts in main memory."""
    hybrid = plan.config.hybrid
    if hybrid is None:
        return "they go to the device for each pass"
    computed = "the processor computes them"
    if not hybrid.stream_tokens:
        return computed
    return f"{computed}; for a pass of {hybrid.stream_tokens} tokens or more they are copied to the device"


def _remote_rows(plan: Plan) -> Iterator[tuple[str, str, str]]:
    """Yield what lenders of memory are used for, or why not."""
    reasons = dict(plan.reasons)
    if "remote_experts" in reasons:
        experts = plan.config.experts
        is_used = experts is not None and experts.remote is not None
        yield "experts at lenders", "" if is_used else "none", reasons["remote_experts"]


def _rank_rows(plan: Plan) -> Iterator[tuple[str, str, str]]:
    """Yield what processes share, and what each holds."""
    parallel = plan.config.parallel
    if parallel is None:
        return
    if parallel.stages is not None:
        yield "stages", f"{parallel.num_stages}", _why(plan, "stages")
    if parallel.ranks_per_stage > 1:
        yield "ranks", f"{parallel.num_ranks}", _why(plan, "ranks")
    if layouts := dict(plan.reasons).get("layouts of ranks"):
        yield "layouts of ranks", layouts.partition(": ")[0], _why(plan, "layouts of ranks")
    if held := dict(plan.reasons).get("memory of ranks"):
        yield "weights and KV cache", "by rank", held


def _speculator_rows(plan: Plan) -> Iterator[tuple[str, str, str]]:
    """Yield what drafts, and what models that do take of memory."""
    for name in plan.config.speculators:
        draft = next((draft for draft in plan.config.draft_models if draft.name == name), None)
        yield "speculator", Path(name).name, "" if draft is None else f"{format_bytes(draft.num_bytes)} in memory"


def _has_device(plan: Plan) -> bool:
    return plan.forecast is not None and any(used.tier == DEVICE for used in plan.forecast.memory)


def prediction_table(plan: Plan, forecast: Forecast) -> Table:
    """Return what to expect, with intervals."""
    rows = [
        ("generated tokens/s, prefill included", *_numbers(forecast.tokens_per_s)),
        ("decode tokens/s, all together", *_numbers(forecast.decode_tokens_per_s)),
        ("decode tokens/s, one alone", *_numbers(forecast.decode_alone_tokens_per_s)),
        ("prefill tokens/s", *_numbers(forecast.prefill_tokens_per_s)),
        ("time to first token, alone", *_times(forecast.time_to_first_token_s)),
        *_all_at_once(forecast),
        ("time per token of a request", *_times(forecast.time_per_token_s)),
    ]
    each = " of each device" if forecast.policy.num_devices > 1 else ""
    for used in forecast.memory:
        peak = used.peak_bytes
        name = f"peak {_TIERS[used.tier]}" + (each if used.tier == DEVICE else "")
        between = f"{format_bytes(peak.low)} to {format_bytes(peak.high)}"
        rows.append((f"{name}, of {format_bytes(used.capacity_bytes)}", format_bytes(peak.value), between))
    notes = [f"Decoding is bound by {forecast.bottleneck}."] if forecast.bottleneck else []
    busy = [f"{_RESOURCES.get(name, f'the {name}')} {share:.0%}" for name, share in forecast.busy if share >= MIN_SHARE]
    if len(busy) > 1:
        notes.append(f"Busy while a step is decoded: {', '.join(busy)} of the time.")
    if rates := dict(plan.reasons).get("hybrid rates"):
        notes += [f"{rate}." for rate in rates.split("; ")]
    measured = dict(plan.reasons).get("machine", "")
    if measured:
        notes.append(f"This machine was {measured}.")
    spread = forecast.tokens_per_s.high / forecast.tokens_per_s.value
    if plan.machine_identity and spread >= 1 + FAR_APART:
        notes.append(f"The machine was busy while it was measured: its figures lay up to {spread:.1f} times apart.")
        notes.append("Measured again while nothing else runs (--recalibrate), predictions are closer.")
    return Table("Expected", ("", "value", "between"), tuple(rows), tuple(notes))


def _all_at_once(forecast: Forecast) -> Iterator[tuple[str, str, str]]:
    """Yield what a request waits for its first token that comes with all the others, as batch jobs' do."""
    number = forecast.policy.batch_size
    if number > 1:
        yield f"the same, {number} prompts at once", *_times(forecast.all_prompts_s)


def helps_table(goal: str, helps: tuple[Sensitivity, ...]) -> Table:
    """Return what more of a resource would bring, or a smaller format; best first."""
    what = "a step's speed" if goal == "latency" else "generated tokens/s"
    rows = tuple((it.change, f"x{it.speedup:.2f}") for it in helps[:_MAX_HELPS])
    return Table("What would help most, each planned anew", ("", what), rows)


def check_table(rows: Sequence[CheckRow]) -> Table:
    """Return predicted figures next to measured ones."""
    is_informed = any(row.informed is not None for row in rows)
    cells = []
    for row in rows:
        error = "" if row.informed_error is None else f"{row.informed_error:+.1%}"
        cell = (row.name, _measure(row.predicted, row.unit), _measure(row.measured, row.unit), f"{row.error:+.1%}")
        cells.append((*cell, error) if is_informed else cell)
    notes = ["Median error of speeds: " + f"{statistics.median(abs(row.error) for row in rows if is_speed(row)):.1%}."]
    if is_informed:
        known = statistics.median(abs(row.informed_error or 0.0) for row in rows if is_speed(row))
        notes.append(f"From actual reads: {known:.1%}. How often experts are needed again depends on model and text:")
        notes.append("`moeflow generate --record-routing FILE` notes it, `moeflow plan --routing FILE` uses it.")
    columns = ("", "predicted", "measured", "error")
    return Table("Checked", (*columns, "knowing reads") if is_informed else columns, tuple(cells), tuple(notes))


def check_json(plan: Plan, rows: Sequence[CheckRow]) -> str:
    """Return the same as JSON, with the plan."""
    checked = [asdict(row) | {"error": round(row.error, 4), "informed_error": row.informed_error} for row in rows]
    return json.dumps({"plan": json.loads(plan_to_json(plan)), "checked": checked}, indent=1, allow_nan=False)


def is_speed(row: CheckRow) -> bool:
    """Return whether a row is tokens a second or a time to the first token."""
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


def _summary(pipeline: str) -> str:
    if pipeline in PIPELINES:
        return PIPELINES[pipeline].summary
    return _NO_STREAM.get(pipeline, "")
