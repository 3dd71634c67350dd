"""Findings on whether a model runs on this machine: its shape, its memory, and its limits.

Reads headers only, and asks the engine's own `resolve`, so the answer is what `serve` would do. Only `--verify` reads
all weights: it looks for numbers that are not finite, and compares the packed file with its checksums.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moeflow.checkpoint.gguf.file_names import gguf_start
from moeflow.cli import lazy
from moeflow.cli.doctor.diagnostics import Finding, Verdict
from moeflow.cli.doctor.modes import other_modes
from moeflow.cli.plan.plan_option import plan_of, read_plan
from moeflow.cli.progress import progress_bar
from moeflow.cli.pulling import headers_of, is_headers_alone
from moeflow.core.engine_config import EngineConfig, MemoryPlan
from moeflow.core.errors import CapacityError, CheckpointError, ConfigError, HubError
from moeflow.core.model_config import ModelConfig
from moeflow.core.units import format_bytes
from moeflow.planner.plan_text import HINT
from moeflow.planner.usage import SERVING

if TYPE_CHECKING:
    from moeflow.planner.choices.packed_files import Damage


_MAX_SHOWN = 10  # damaged parts that are named; others are counted


def examine_model(overrides: dict[str, Any], *, verifies: bool = False) -> list[Finding]:
    """Look at the model that the user named, with the limits that the user set; read its packed file if wanted."""
    try:
        checkpoint = lazy.open_checkpoint(overrides["model"])
    except CheckpointError as error:
        return [Finding("model", Verdict.MISSING, str(error))]
    try:
        shape = lazy.read_model_config(checkpoint)
        num_bytes = sum(tensor.num_bytes for tensor in checkpoint.tensors.values())
    except CheckpointError as error:
        return [Finding("model", Verdict.MISSING, str(error))]
    finally:
        checkpoint.close()
    found = [Finding("model", Verdict.OK, f"{describe(shape)}, {format_bytes(num_bytes)} on disk")]
    found += examine_tokenizer(Path(overrides["model"]))
    try:
        has_replicas = (overrides.get("num_replicas") or 1) > 1  # which are of servers alone
        plan = plan_of(overrides | {"is_served": True} if has_replicas else overrides, SERVING)
    except (CapacityError, CheckpointError, ConfigError) as error:
        return [*found, Finding("fit", Verdict.MISSING, str(error)), *other_modes(overrides, None)]
    found += limits(plan.config, shape)
    found += [Finding("because", Verdict.OK, f"{name} = {why}") for name, why in plan.reasons]
    found.append(Finding("speed", Verdict.OK, lazy.what_to_expect(plan) or HINT))
    found += other_modes(overrides, plan)
    return [*found, *([*verify_weights(plan.config), *verify(plan.config)] if verifies else [])]


def examine_tokenizer(model: Path) -> list[Finding]:
    """Return faults of a GGUF file's tokenizer, which is in the header."""
    file = gguf_start(model)
    if file.suffix != ".gguf":
        return []
    try:
        notice = lazy.read_gguf(file).notice
    except CheckpointError as error:
        return [Finding("tokenizer", Verdict.MISSING, str(error))]
    return [Finding("tokenizer", Verdict.WARN, notice)] if notice else []


def examine_named_model(overrides: dict[str, Any], *, verifies: bool = False) -> list[Finding]:
    """Look at the model that the user named: at its path, where it was pulled to, or at its headers on the hub."""
    try:
        with headers_of(overrides["model"]) as path:
            return examine_model({**overrides, "model": path}, verifies=verifies)
    except (CheckpointError, HubError) as error:
        return [Finding("model", Verdict.MISSING, str(error))]


def verify_weights(config: EngineConfig) -> list[Finding]:
    """Read the model's own files and name tensors with NaN or infinite numbers; skip a model with headers alone."""
    if is_headers_alone(config.model_path):
        return []
    try:
        with closing(lazy.open_checkpoint(config.model_path)) as checkpoint, progress_bar("Verifying") as on_bytes:
            names = [name for name, _ in lazy.outline(checkpoint).named_weights()]
            found = lazy.find_not_finite(checkpoint, names, on_bytes)
    except CheckpointError as error:
        return [Finding("weights", Verdict.MISSING, str(error))]
    if not found:
        return [Finding("weights", Verdict.OK, "all numbers are finite")]
    more = f" and {len(found) - _MAX_SHOWN} more" if len(found) > _MAX_SHOWN else ""
    listed = ", ".join(found[:_MAX_SHOWN]) + more
    remedy = "Download or convert the model again"
    return [Finding("weights", Verdict.MISSING, f"NaN or infinite numbers in {listed}", remedy)]


def verify(config: EngineConfig) -> list[Finding]:
    """Compare the packed file that would be used with its checksums, under a progress bar."""
    file = lazy.used_packed_weights_file(config)
    if file is None or not file.exists():
        remedy = "`moeflow pack`, with the same model and format, makes one"
        return [Finding("packed file", Verdict.WARN, "there is none to verify", remedy)]
    try:
        with progress_bar("Verifying") as on_bytes:
            damaged = lazy.find_damage(config, on_bytes)
    except (CheckpointError, ConfigError) as error:
        return [Finding("packed file", Verdict.MISSING, str(error))]
    if not damaged:
        return [Finding("packed file", Verdict.OK, f"{file}: all of it is as it was written")]
    remedy = "Pack the model again (`moeflow pack`, with the same model and format), which makes the file anew"
    more = "" if len(damaged) <= _MAX_SHOWN else f", of which the first {_MAX_SHOWN} follow"
    head = Finding("packed file", Verdict.MISSING, f"{file}: {len(damaged)} of its parts are damaged{more}", remedy)
    return [head, *(Finding("", Verdict.MISSING, describe_damage(part)) for part in damaged[:_MAX_SHOWN])]


def describe_damage(damage: Damage) -> str:
    """Return one line that names the damage and the affected weights."""
    names = ", ".join(damage.tensors[:3])
    more = f" and {len(damage.tensors) - 3} more" if len(damage.tensors) > 3 else ""
    return f"{damage.part} ({names}{more}): {damage.cause}"


def describe(shape: ModelConfig) -> str:
    """Write a model's shape in a line."""
    experts = (
        f"{shape.routing.num_experts} experts, {shape.routing.top_k} a token" if shape.routing.num_experts else "dense"
    )
    total, active = shape.num_parameters / 1e6, shape.num_active_parameters / 1e6
    layers = f"{shape.num_layers} layers"
    if shape.encoder is not None:
        layers = f"{shape.encoder.num_layers} layers of an encoder and {shape.num_layers} of a decoder"
    return f"{shape.model_type}, {layers}, {experts}, {total:.0f} M parameters, {active:.0f} M active"


def limits(config: EngineConfig, shape: ModelConfig) -> list[Finding]:
    """Return with which limits the model would run, and why."""
    scheduler = config.scheduler
    tokens = scheduler.num_blocks * scheduler.block_size
    found = [
        Finding(
            "fit", Verdict.OK, f"weights in {config.weight_format} on {place(config)}, {config.num_threads} threads"
        ),
        Finding("KV cache", Verdict.OK, f"{format_bytes(config.kv_cache_bytes)} in {config.kv_dtype}, {tokens} tokens"),
        Finding(
            "requests", Verdict.OK, f"{scheduler.max_num_seqs} together, {scheduler.max_model_len} tokens each at most"
        ),
    ]
    found += experts(config, shape)
    if changes := config.sampling_defaults.changes():
        values = ", ".join(f"{name} {value:g}" for name, value in changes.items())
        remedy = "--generation-config none ignores these defaults of the model"
        found.append(Finding("sampling", Verdict.OK, values, remedy))
    if config.cpu_isa and not config.packed_file and config.experts is None:
        remedy = "`moeflow pack`, with the same model and format, writes them packed; starts then take a moment"
        found.append(Finding("start", Verdict.OK, "weights are packed at every start", remedy))
    if config.memory is not None:
        found += shares(config, config.memory, shape)
    if scheduler.max_model_len < shape.max_position:
        remedy = "A larger --kv-cache makes room for longer ones"
        found.append(Finding("context", Verdict.WARN, f"the model could take {shape.max_position} tokens", remedy))
    return found


def experts(config: EngineConfig, shape: ModelConfig) -> list[Finding]:
    """Return the share of experts that a GPU computes, if it computes."""
    number = shape.routing.num_experts
    if not number or config.device == "cpu":
        return []
    hybrid = config.hybrid
    if hybrid is None:
        return [Finding("experts", Verdict.OK, f"100% on {config.device}")]
    share = f"{hybrid.num_gpu_experts / number:.1%} on {config.device}: {hybrid.num_gpu_experts} of {number} of a layer"
    others = f"the CPU computes the others in {hybrid.cpu_weight_format}"
    if hybrid.stream_tokens:
        others += f"; for a pass of {hybrid.stream_tokens} tokens or more they are copied to {config.device}"
    return [Finding("experts", Verdict.OK, f"{share}; {others}")]


def place(config: EngineConfig) -> str:
    """Return where weights are."""
    if config.offload is None:
        return config.device
    device = "an emulated device" if config.offload.cuda is None else config.offload.cuda.name
    return f"{device}, experts also in main memory"


def shares(config: EngineConfig, memory: MemoryPlan, shape: ModelConfig) -> list[Finding]:
    """Return what a memory limit is used for. The limits of `generate` also apply to a server, with fewer bytes for
    experts."""
    processes = "both processes" if memory.is_served else "the process; a server takes some 300 MiB more"
    num_experts = shape.routing.num_experts * shape.num_moe_layers
    held = "weights that stay there"
    if config.hybrid is not None and config.experts is not None:
        held = f"experts: {config.experts.num_slots} of {num_experts}; the GPU and the disk have the others"
    lines = [
        (memory.process_bytes, processes),
        (memory.weight_bytes, held),
        (memory.work_bytes, f"work space of a pass of {config.scheduler.max_num_batched_tokens} tokens, at most"),
    ]
    if config.hybrid is not None:  # keys and values are on the GPU
        lines.pop()
    elif config.experts is None:
        lines.append((config.kv_cache_bytes, "keys and values, at most"))
    else:
        lines += [
            (config.kv_cache_bytes, "keys and values, at most; experts have what these two do not need"),
            (
                config.experts.num_slots * config.experts.slab_bytes,
                f"experts: up to {config.experts.num_slots} of {num_experts}, {config.experts.min_slots} at least",
            ),
        ]
    head = Finding("memory limit", Verdict.OK, f"{format_bytes(memory.limit_bytes)}, of which")
    return [head, *(Finding("", Verdict.OK, f"{format_bytes(size):>10}  {what}") for size, what in lines)]


def examine_planned_model(overrides: dict[str, Any], *, verifies: bool = False) -> list[Finding]:
    """Look at the model that a plan is for."""
    try:
        model = read_plan(overrides["plan_file"]).config.model_path
    except ConfigError as error:
        return [Finding("plan", Verdict.MISSING, str(error))]
    return examine_model({**overrides, "model": model}, verifies=verifies)


def examine_builtin_model(overrides: dict[str, Any], *, verifies: bool = False) -> list[Finding]:
    """Check the built-in model, or its source if it is not built."""
    folder = lazy.builtin_folder(overrides["cache_dir"])
    if folder.is_dir():
        found = examine_model({**overrides, "model": str(folder)}, verifies=verifies)
        return [Finding("built-in model", Verdict.OK, str(folder)), *found]
    try:
        source = lazy.builtin_source()
    except ConfigError as error:
        return [Finding("built-in model", Verdict.WARN, "neither made nor its source installed", str(error))]
    return [Finding("built-in model", Verdict.OK, f"not made yet; the first `moeflow serve` makes it from {source}")]
