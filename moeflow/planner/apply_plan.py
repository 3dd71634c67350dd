"""Apply a plan: as it is, or decided again with other settings of the user.

A plan's configuration runs unchanged. A plan is decided again, from its own settings, if the user changes one of them,
if its files are gone, or if it has more threads than this machine has cores.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from moeflow.core.engine_config import EngineConfig
from moeflow.core.errors import CapacityError, ConfigError
from moeflow.core.plan import Plan
from moeflow.core.units import format_bytes
from moeflow.experts.predict.registry import WHOLE_PASS
from moeflow.kernels.cpu import extension
from moeflow.kernels.on_demand import on_demand
from moeflow.models.expert_predictor import saved
from moeflow.planner.choices.memory_allowance import allowed_bytes
from moeflow.planner.choices.packed_files import used_packed_weights_file
from moeflow.planner.choices.processor_choice import no_cuda
from moeflow.planner.costs.rank_costs import Sharing
from moeflow.planner.hardware.host import HostResources, host_resources
from moeflow.planner.hardware.this_machine import machine_identity
from moeflow.planner.model_files import bare_config
from moeflow.planner.planning import OnStep, check_threads, plan_for_start
from moeflow.planner.resolve import resources_for
from moeflow.planner.usage import Usage
from moeflow.settings.settings import Settings, dependent_settings, from_plain

with on_demand(__name__):
    from moeflow.checkpoint.hub import local_models


def apply_plan(
    plan: Plan, given: Mapping[str, Any], on_step: OnStep = lambda _: None, resources: HostResources | None = None
) -> Plan:
    """Return the plan that an engine starts with: this one, unless it has to be decided again.

    `given` has the fields of `Settings` that the user gave. `resources` are those of the machine, by default the
    current ones.

    Blocks: as `plan_for_start`, if the plan is decided again.
    Raises: ConfigError for a plan of another model or machine, CapacityError if it does not fit; as `plan_for_start`.
    """
    changed = changes(plan, given)
    if plan.config.memory is None:  # both kinds of process keep the same configuration
        changed.pop("is_served", None)
    settings = settings_beside(plan, given, resources)
    here = resources or resources_for(replace(settings, device=_device_of(plan)))
    if not changed and _has_files(plan.config) and _has_cores(plan, here):
        _check_fit(plan, here)
        return plan
    return plan_for_start(settings, Usage(workload=plan.workload, goal=plan.goal), on_step, resources)


def settings_beside(plan: Plan, given: Mapping[str, Any], resources: HostResources | None = None) -> Settings:
    """Return the plan's settings with changes by the user. The number of concurrent requests stays as planned.

    Raises: ConfigError if the plan is for another model, for one without weights, or for more threads than cores.
    """
    changed = changes(plan, given)
    planned = replace(from_plain(plan.settings), model=local_models.local_path(plan.config.model_path))
    if "num_threads" not in given:
        check_threads(planned, resources or host_resources())
    return replace(planned, **{"max_num_seqs": plan.config.scheduler.max_num_seqs, **changed})


def changes(plan: Plan, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that the user changes, and others that depend on them: name -> value.

    Raises: ConfigError, as `settings_beside`.
    """
    _check_model(plan, given.get("model"))
    planned, defaults = from_plain(plan.settings), Settings()
    chosen = planned
    if planned.device == "auto" and plan.config.offload is None:
        chosen = replace(planned, device=plan.config.device)
    changed: dict[str, Any] = {}
    names = [name for name in given if name != "model"]
    for name in names:  # grows by settings that depend on changed ones
        value = given.get(name, getattr(defaults, name))
        if name not in changed and value not in (getattr(planned, name), getattr(chosen, name)):
            changed[name] = value
            names += dependent_settings(name)
    return changed


def machine_notice(plan: Plan, num_threads: int | None) -> str | None:
    """Return a warning if a plan was made for another machine than this; None if not.

    `num_threads` None: as planned.
    """
    here = host_resources()
    is_set = num_threads is not None or "num_threads" in plan.settings
    if not is_set and not _has_cores(plan, here):
        return (
            f"the plan has {plan.config.num_threads} threads a process, but this machine has {here.num_cores} cores: "
            "it is decided again for these. Make one here with `moeflow plan --json`"
        )
    num_threads = num_threads or plan.settings.get("num_threads") or here.num_cores  # of all processes
    if plan.machine_identity == machine_identity(num_threads):
        return None
    whose = "another machine, or for this one in another state" if plan.machine_identity else plan.machine
    return (
        f"the plan was made for {whose}, not for this one with --threads {num_threads}: what "
        "it expects may not come true. Make one here with `moeflow plan --json`"
    )


def _has_cores(plan: Plan, here: HostResources) -> bool:
    """Return whether each thread of a plan's processes has a core, or each process has one thread."""
    sharing = Sharing(parallel=plan.config.parallel, num_replicas=plan.num_replicas)
    most = max(here.num_cores // (sharing.num_here * plan.num_replicas), 1)
    return 1 <= plan.config.num_threads <= most


def _has_files(config: EngineConfig) -> bool:
    """Return whether all files that an engine needs at its start are there."""
    return all(map(os.path.exists, config.needed_files)) and _has_predictor(config)


def _has_predictor(config: EngineConfig) -> bool:
    """Return whether the networks that predict experts are there, if the engine needs any."""
    reads_ahead = config.experts is not None and config.experts.predictor == WHOLE_PASS
    if not config.lossy_top_k and not reads_ahead:
        return True
    folders = saved.folders_of(Path(config.model_path), used_packed_weights_file(config))
    return saved.is_saved(folders[0]) if config.lossy_top_k else any(map(saved.is_saved, folders))


def _check_fit(plan: Plan, here: HostResources) -> None:
    """Raises: ConfigError or CapacityError if this machine cannot run the plan's configuration."""
    config, device = plan.config, _device_of(plan)
    if config.cpu_isa and (not extension.is_available() or _best_isa(config.cpu_isa) != config.cpu_isa):
        raise ConfigError(
            f"the plan needs CPU kernels for {config.cpu_isa}, but they do not run on this machine: make the plan "
            "here with `moeflow plan --json`"
        )
    if device != "cpu" and here.accelerator is None:
        raise no_cuda(device, here)
    if device != "cpu" and config.parallel is not None:
        need, have = config.parallel.num_ranks, len(here.accelerators_free_bytes)
        if need > have:
            raise ConfigError(
                f"the plan needs {need} GPUs from {device} on, and there are {have}: make it here with `moeflow plan "
                "--json`"
            )
    if config.offload is not None and config.offload.cuda is not None:
        allowed_bytes("device memory", config.offload.cuda.memory_bytes, here.accelerator_free_bytes)
    if config.hybrid is not None and config.gpu_memory_bytes:
        allowed_bytes("device memory", config.gpu_memory_bytes, here.accelerator_free_bytes)
    room = here.available_bytes + (here.process_bytes if config.memory is not None else 0)  # a limit covers both
    if plan.memory_bytes > room:
        raise CapacityError(
            f"the plan needs {format_bytes(plan.memory_bytes)} of memory, but {format_bytes(room)} are free: free "
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


def _check_model(plan: Plan, asked: str | None) -> None:
    model = plan.config.model_path
    if asked is not None and Path(asked).absolute() != Path(local_models.local_path(model)).absolute():
        raise ConfigError(
            f"the plan is for {model}, not for {asked}: make one for this model, `moeflow plan {asked} --json`"
        )
    if bare_config(model) is not None:
        raise ConfigError(
            f"the plan is for {model}, a shape without weights: make one for a folder or .gguf file that has them"
        )
