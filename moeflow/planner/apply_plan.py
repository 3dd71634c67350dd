"""From a plan to the settings that run it. What the user set explicitly takes precedence, and is reported."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from moeflow.core.address import format_address
from moeflow.core.engine_config import EngineConfig
from moeflow.core.errors import ConfigError
from moeflow.core.offload_config import PREFIX, CudaDeviceConfig, OffloadConfig
from moeflow.core.parallel_config import RayConfig
from moeflow.core.plan import Plan
from moeflow.kernels.on_demand import on_demand
from moeflow.kernels.weight_format import DTYPES, QUANTIZED
from moeflow.planner.choices.remote_choice import addresses_of
from moeflow.planner.hardware.host import host_resources
from moeflow.planner.hardware.this_machine import machine_identity
from moeflow.planner.model_files import bare_config
from moeflow.planner.settings import LOSSY_ROUTING, Settings, options

if TYPE_CHECKING:
    from moeflow.checkpoint.hub import local_models
else:
    local_models = on_demand("moeflow.checkpoint.hub.local_models")

_FORMATS: Final = ("dtype", "quantize")  # one says what the other would
_UNPLANNED: Final = {"packed_weights_file", "record_routing", "trace_file", "graph_file"}  # of the run, not the plan
_OF_WORKLOAD: Final = {"max_model_len", "kv_cache_bytes"}  # a plan has them for requests as long as its workload's
_DEFAULTS: Final = Settings()


def settings_from_plan(plan: Plan, settings: Settings) -> Settings:
    """Return settings that make the engine do what a plan says; what the user set explicitly stays.

    Requests may be longer than the plan's workload, so the context and its cache stay open.

    Raises: ConfigError if the plan is for another model, for one without weights, or for engines whose limit it lacks.
    """
    _check_model(plan, settings)
    explicit, planned = _explicit(settings), _settings_of_all(plan)
    if plan.num_replicas > 1 and plan.config.memory is not None and settings.memory_bytes is None:
        raise ConfigError(
            f"the plan is for {plan.num_replicas} engines within a limit, of which it has the part of each: say the "
            "whole limit again (--memory)"
        )
    names = {field.name for field in dataclasses.fields(Settings)} - explicit - _OF_WORKLOAD
    decided = {name: getattr(planned, name) for name in names if getattr(planned, name) != _default(name)}
    return dataclasses.replace(settings, **decided)


def overruled(plan: Plan, settings: Settings) -> list[tuple[str, Any, Any]]:
    """Return where explicit settings differ from a plan: (field, the explicit value, the planned value)."""
    planned = _settings_of_all(plan)
    return [
        (name, getattr(settings, name), getattr(planned, name))
        for name in options()
        if name in _explicit(settings) - _UNPLANNED - _OF_WORKLOAD
        and getattr(settings, name) not in (getattr(planned, name), _default(name))
    ]


def machine_notice(plan: Plan, settings: Settings) -> str | None:
    """Return a warning if a plan was made for another machine than this; None if not."""
    num_threads = settings.num_threads or plan.config.num_threads or host_resources().num_cores
    if plan.machine_identity == machine_identity(num_threads):
        return None
    whose = "another machine, or for this one in another state" if plan.machine_identity else plan.machine
    return (
        f"the plan was made for {whose}, not for this one with --threads {num_threads}: what "
        "it expects may not come true. Make one here with `moeflow plan --json`"
    )


def _settings_of_all(plan: Plan) -> Settings:
    """Return the settings of a plan; of several engines, what they share among them."""
    one, number = settings_of(plan.config), plan.num_replicas
    if number == 1:
        return one
    return dataclasses.replace(
        one,
        num_replicas=number,
        num_threads=None if one.num_threads is None else number * one.num_threads,
        memory_bytes=None,
    )


def _default(name: str) -> Any:
    return getattr(_DEFAULTS, name)


def _explicit(settings: Settings) -> set[str]:
    """Return the fields that the user gave a value; of formats both, if one of them."""
    explicit = {field.name for field in dataclasses.fields(settings)}
    explicit = {name for name in explicit if getattr(settings, name) != _default(name)}
    return explicit | set(_FORMATS) if explicit & set(_FORMATS) else explicit


def settings_of(config: EngineConfig) -> Settings:
    """Return the settings that lead to a configuration again, on a machine with as much memory."""
    parallel = config.parallel
    num_ranks = 1 if parallel is None else parallel.num_ranks
    sharing = parallel if parallel is not None and parallel.ranks_per_stage > 1 else None
    join = None if parallel is None else parallel.join
    remote = None if config.experts is None else config.experts.remote
    num_threads = config.num_threads * (num_ranks if join is None else 1)
    offload, is_own = config.offload, config.is_own_precision  # the checkpoint's own formats, which "auto" finds again
    return Settings(
        model=config.model_path,
        device=config.device if offload is None else _device(offload),
        dtype=config.weight_format if config.weight_format in DTYPES and not is_own else "auto",
        quantize=_quantized_to(config),
        exact_activations=config.is_wide if is_own else _default("exact_activations"),
        kv_dtype=config.kv_dtype,
        num_threads=num_threads or None,
        num_ranks=None if parallel is None else num_ranks,
        stages=None if parallel is None or parallel.stages is None else ",".join(map(str, parallel.stages.num_layers)),
        expert_layout="auto" if sharing is None else sharing.expert_layout,
        expert_placement="auto" if parallel is None or parallel.moves_experts else "index",
        num_redundant_experts=None if parallel is None else parallel.num_redundant_experts or None,
        attention_layout="auto" if sharing is None else sharing.attention_layout,
        expert_parallel=config.expert_parallel is not None,
        listen_ranks=None if join is None else format_address(join.host, join.port),
        ray_address=None if join is None or join.ray is None else join.ray.address,
        ray_placement=_default("ray_placement") if join is None or join.ray is None else _placement(join.ray),
        remote_experts=None if remote is None else addresses_of(remote.lenders),
        cluster_token_file=next((Path(it.token_file) for it in (join, remote) if it is not None), None),
        max_model_len=config.scheduler.max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        prefix_caching=config.scheduler.prefix_caching,
        prompt_cache=None if config.prompt_cache is None else Path(config.prompt_cache.folder),
        prompt_cache_bytes=None if config.prompt_cache is None else config.prompt_cache.max_bytes,
        kv_cache_bytes=config.kv_cache_bytes,
        memory_bytes=None if config.memory is None else config.memory.limit_bytes,
        pipeline=None if offload is None else offload.pipeline,
        micro_batch=None if offload is None else offload.micro_batch_tokens,
        speculators=config.speculators,
        expert_capacity=config.expert_capacity or None,
        lossy_routing=next((name for name, top_k in LOSSY_ROUTING.items() if top_k == config.lossy_top_k), None),
        expert_policy="auto" if config.experts is None else config.experts.policy,
        predictor="auto" if config.experts is None else config.experts.predictor,
    )


def _quantized_to(config: EngineConfig) -> str | None:
    """Return what the user asked weights to be quantized to."""
    is_rounded = config.weight_format in QUANTIZED and not config.is_own_precision
    return config.mix or (config.weight_format if is_rounded else None)


def _placement(ray: RayConfig) -> str:
    return "spread" if ray.shares_nodes else "strict-spread"


def _device(offload: OffloadConfig) -> str:
    """Return the device as the user would name it."""
    device = offload.device
    if isinstance(device, CudaDeviceConfig):
        return f"{device.name}:{device.memory_bytes}"
    speeds = "" if device.speeds.device_flops == 0 else ",t4"
    return f"{PREFIX}:{device.capacity_bytes},{device.speeds.link / 1e9:g}{speeds}" + (
        ",torch" if device.computes_in_torch else ""
    )


def _check_model(plan: Plan, settings: Settings) -> None:
    model = plan.config.model_path
    if (
        settings.model is not None
        and Path(settings.model).absolute() != Path(local_models.local_path(model)).absolute()
    ):
        raise ConfigError(
            f"the plan is for {model}, not for {settings.model}: "
            f"make one for this model, `moeflow plan {settings.model} --json`"
        )
    if bare_config(model) is not None:
        raise ConfigError(
            f"the plan is for {model}, a shape without weights: make one for a folder or .gguf file that has them"
        )
