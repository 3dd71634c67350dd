"""From a plan to the settings that run it. What the user set explicitly takes precedence, and is reported."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Final

from moeflow.core.errors import ConfigError
from moeflow.core.hardware import RAM
from moeflow.core.plan import DISK_OFFLOAD, RESIDENT, Plan
from moeflow.pipeline.catalog import PIPELINES
from moeflow.planner.choices.weight_choice import DTYPES, QUANTIZED
from moeflow.planner.hardware.host import measure_machine
from moeflow.planner.hardware.this_machine import machine_identity
from moeflow.planner.model_files import shipped_models
from moeflow.planner.settings import Settings

_FORMATS: Final = ("dtype", "quantize")  # one says what the other would
_DEFAULTS: Final = Settings()


def settings_from_plan(plan: Plan, settings: Settings) -> Settings:
    """Return settings that make the engine do what a plan says; what the user set explicitly stays.

    Raises: ConfigError if the plan is for a machine with a device, for another model, or for one without weights.
    """
    _check_device(plan, settings)
    _check_model(plan, settings)
    explicit, planned = _explicit(settings), _planned(plan)
    return dataclasses.replace(settings, **{name: value for name, value in planned.items() if name not in explicit})


def overruled(plan: Plan, settings: Settings) -> list[tuple[str, Any, Any]]:
    """Return where explicit settings differ from a plan: (field, the explicit value, the planned value)."""
    explicit = _explicit(settings) - {"model"}
    planned = _planned(plan)
    return [
        (name, getattr(settings, name), planned[name])
        for name in planned
        if name in explicit and getattr(settings, name) not in (planned[name], _default(name))
    ]


def machine_notice(plan: Plan, settings: Settings) -> str | None:
    """Return a warning if a plan was made for another machine than this; None if not."""
    num_threads = settings.num_threads or plan.num_threads or measure_machine().num_cores
    if plan.machine_identity == machine_identity(num_threads):
        return None
    whose = "another machine, or for this one in another state" if plan.machine_identity else plan.machine
    return (
        f"the plan was made for {whose}, not for this one with --threads {num_threads}: what "
        "it expects may not come true. Make one here with `moeflow plan --json`"
    )


def _default(name: str) -> Any:
    return getattr(_DEFAULTS, name)


def _explicit(settings: Settings) -> set[str]:
    """Return the fields that the user gave a value; of formats both, if one of them."""
    explicit = {field.name for field in dataclasses.fields(settings)}
    explicit = {name for name in explicit if getattr(settings, name) != _default(name)}
    return explicit | set(_FORMATS) if explicit & set(_FORMATS) else explicit


def _planned(plan: Plan) -> dict[str, Any]:
    quantize = plan.weight_format if plan.weight_format in QUANTIZED else None
    memory_bytes = plan.memory_bytes or None
    if memory_bytes is None and plan.pipeline == DISK_OFFLOAD:
        memory_bytes = next(used.capacity_bytes for used in plan.memory if used.tier == RAM)
    return {
        "model": plan.model,
        "device": "cpu",
        "dtype": plan.weight_format if plan.weight_format in DTYPES else "auto",
        "quantize": quantize,
        "kv_dtype": plan.kv_dtype,
        "num_threads": plan.num_threads or None,
        "max_model_len": plan.workload.max_tokens,
        "max_num_seqs": plan.policy.batch_size,
        "max_num_batched_tokens": max(plan.policy.chunk_tokens, plan.policy.batch_size),
        "kv_cache_bytes": plan.kv_cache_bytes,
        "memory_bytes": memory_bytes,
    }


def _check_device(plan: Plan, settings: Settings) -> None:
    known = (RESIDENT, DISK_OFFLOAD, *PIPELINES)
    if plan.pipeline not in known:
        raise ConfigError(f"the plan's pipeline is {plan.pipeline!r}: use one of {', '.join(known)}")
    if plan.policy.attention_on_device or plan.policy.ffn_on_device:
        raise ConfigError(
            f"the plan is for {plan.machine}, which has a device: make one for this machine with `moeflow plan --json`"
        )
    if settings.device not in ("auto", "cpu"):
        raise ConfigError(
            f"the plan is for a processor without a device, but --device says {settings.device}: leave one of them away"
        )


def _check_model(plan: Plan, settings: Settings) -> None:
    if settings.model is not None and Path(settings.model).absolute() != Path(plan.model):
        raise ConfigError(
            f"the plan is for {plan.model}, not for {settings.model}: "
            f"make one for this model, `moeflow plan {settings.model} --json`"
        )
    if plan.model.endswith(".json") or plan.model in shipped_models():
        raise ConfigError(
            f"the plan is for {plan.model}, a shape without weights: make one for a folder or .gguf file that has them"
        )
