"""Apply a plan: as it is, or decided again with other settings of the user.

A plan's configuration runs unchanged. A plan is decided again, from its own settings, if the user changes one of them,
or if its files are elsewhere on this machine.
"""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from moeflow.core.errors import CapacityError, ConfigError
from moeflow.core.plan import Plan
from moeflow.core.units import format_bytes
from moeflow.kernels.cpu import extension
from moeflow.kernels.on_demand import on_demand
from moeflow.planner.choices.memory_allowance import allowed_bytes
from moeflow.planner.choices.processor_choice import no_cuda
from moeflow.planner.hardware.host import HostResources, host_resources
from moeflow.planner.hardware.this_machine import machine_identity
from moeflow.planner.model_files import bare_config
from moeflow.planner.planning import OnStep, plan_for_start
from moeflow.planner.resolve import resources_for
from moeflow.planner.settings import MAX_THREADS, Settings, from_plain
from moeflow.planner.usage import Usage

with on_demand(__name__):
    from moeflow.checkpoint.hub import local_models

_TOGETHER: Final = (  # a change of the first setting also sets the others, which depend on it
    ("dtype", "quantize"),
    ("quantize", "dtype"),
    ("device", "pipeline", "micro_batch", "resident_experts", "memory_bytes", "device_memory_bytes"),
    ("num_replicas", "expert_parallel"),
    ("num_ranks", "stages", "expert_layout", "attention_layout"),
)


def apply_plan(
    plan: Plan, asked: Settings, on_step: OnStep = lambda _: None, resources: HostResources | None = None
) -> Plan:
    """Return the plan that an engine starts with: this one, unless it has to be decided again.

    `asked` has the settings of the command line. `resources` are those of the machine, by default the current ones.

    Blocks: as `plan_for_start`, if the plan is decided again.
    Raises: ConfigError for a plan of another model or machine, CapacityError if it does not fit; as `plan_for_start`.
    """
    changed = changes(plan, asked)
    if plan.config.memory is None:  # both kinds of process keep the same configuration
        changed.pop("is_served", None)
    if not changed and _has_files(plan):
        _check_fit(plan, resources or resources_for(replace(from_plain(plan.settings), device=_device_of(plan))))
        return plan
    return plan_for_start(
        settings_beside(plan, asked), Usage(workload=plan.workload, goal=plan.goal), on_step, resources
    )


def settings_beside(plan: Plan, asked: Settings) -> Settings:
    """Return the plan's settings with changes by the command line. The number of concurrent requests stays as planned.

    Raises: ConfigError if the plan is for another model, or for one without weights.
    """
    _check_model(plan, asked)
    planned = replace(from_plain(plan.settings), model=local_models.local_path(plan.config.model_path))
    return replace(planned, **{"max_num_seqs": plan.config.scheduler.max_num_seqs, **changes(plan, asked)})


def changes(plan: Plan, asked: Settings) -> dict[str, Any]:
    """Return the settings that the command line changes: name -> value. Raises: ConfigError, as `settings_beside`."""
    _check_model(plan, asked)
    planned, defaults = from_plain(plan.settings), Settings()
    names = [field.name for field in dataclasses.fields(Settings) if field.name != "model"]
    given = [name for name in names if getattr(asked, name) not in (getattr(defaults, name), getattr(planned, name))]
    names = [*given, *(name for first, *others in _TOGETHER if first in given for name in others)]
    return {name: getattr(asked, name) for name in names}


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


def _has_files(plan: Plan) -> bool:
    """Return whether the model and its packed weights are where the plan has them."""
    config = plan.config
    is_packed = not config.packed_file or config.expert_parallel is not None or Path(config.packed_file).exists()
    return is_packed and Path(config.model_path).exists()


def _check_fit(plan: Plan, here: HostResources) -> None:
    """Raises: ConfigError or CapacityError if this machine cannot run the plan's configuration."""
    config, device = plan.config, _device_of(plan)
    if config.cpu_isa and (not extension.is_available() or _best_isa(config.cpu_isa) != config.cpu_isa):
        raise ConfigError(
            f"the plan needs CPU kernels for {config.cpu_isa}, but they do not run on this machine: make the plan "
            "here with `moeflow plan --json`"
        )
    if not 1 <= config.num_threads <= MAX_THREADS:
        raise ConfigError(f"the plan has {config.num_threads} threads, from 1 to {MAX_THREADS} are possible")
    if device != "cpu" and here.accelerator is None:
        raise no_cuda(device, here)
    if config.offload is not None and config.offload.cuda is not None:
        allowed_bytes("device memory", config.offload.cuda.memory_bytes, here.accelerator_free_bytes)
    have = here.available_bytes + (here.process_bytes if config.memory is not None else 0)  # a limit covers both
    if plan.memory_bytes > have:
        raise CapacityError(
            f"the plan needs {format_bytes(plan.memory_bytes)} of memory, but {format_bytes(have)} are free: free "
            "memory, or make the plan again with `moeflow plan --json`"
        )


def _device_of(plan: Plan) -> str:
    """Return the GPU that computes, as torch calls it, or "cpu"."""
    return plan.config.device if plan.config.offload is None else plan.config.offload.torch_device


def _best_isa(name: str) -> str:
    try:
        return extension.best_isa(name)
    except ValueError:  # unknown to this version
        return ""


def _check_model(plan: Plan, asked: Settings) -> None:
    model = plan.config.model_path
    if asked.model is not None and Path(asked.model).absolute() != Path(local_models.local_path(model)).absolute():
        raise ConfigError(
            f"the plan is for {model}, not for {asked.model}: "
            f"make one for this model, `moeflow plan {asked.model} --json`"
        )
    if bare_config(model) is not None:
        raise ConfigError(
            f"the plan is for {model}, a shape without weights: make one for a folder or .gguf file that has them"
        )
