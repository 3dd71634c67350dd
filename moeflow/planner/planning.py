"""Two ways to a plan: for `moeflow plan`, with what bounds it and what would help; and quickly, before a start."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from moeflow.core.cache_dir import cache_folder, existing_folder
from moeflow.core.errors import CapacityError, ConfigError
from moeflow.core.hardware import DEVICE, DISK, Machine
from moeflow.core.offload_config import CUDA, parse_cuda_device
from moeflow.core.plan import Plan
from moeflow.kernels.on_demand import on_demand, torch
from moeflow.planner.costs.roofline import processor_of
from moeflow.planner.costs.routing_profile import RoutingProfile
from moeflow.planner.hardware.host import HostResources, host_resources
from moeflow.planner.hardware.kernel_bench import shapes_of
from moeflow.planner.hardware.this_machine import (
    MachineNeeds,
    how_measured,
    machine_for_start,
    measured_for_start,
    this_machine,
    was_disturbed,
)
from moeflow.planner.host_forecast import Wanted
from moeflow.planner.model_files import bare_config
from moeflow.planner.resolve import resolve, resources_for
from moeflow.planner.settings import Settings
from moeflow.planner.usage import SERVING, Usage

with on_demand(__name__):
    import shutil

    from moeflow.planner import described
    from moeflow.planner.hardware import calibrate_device, disk_rates, machine_files, measuring_process
    from moeflow.planner.search import sensitivity

OnStep = Callable[[str], None]  # called with the current step


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What to plan for. `settings` has model, formats and limits."""

    settings: Settings
    usage: Usage
    machine: str | None = None  # a name or a file; None: this one
    recalibrate: bool = False  # measure this machine again
    routing: RoutingProfile | None = None  # None: the learnt routing of this model, or even routing


def plan_for_start(
    settings: Settings,
    usage: Usage = SERVING,
    on_step: OnStep = lambda _: None,
    resources: HostResources | None = None,
) -> Plan:
    """Return the plan that an engine is about to start with.

    `resources` are the machine's free resources, by default the current ones.

    Blocks: for a moment; up to six seconds where this machine was never measured.
    Raises: as `resolve`.
    """
    here = resources or resources_for(settings)

    def machine(wanted: Wanted) -> Machine:
        needs = MachineNeeds(
            num_threads=settings.num_threads or here.num_cores,
            ram_bytes=here.available_bytes,
            shapes=tuple(shapes_of(wanted.costs)),
            disk=wanted.packed_file is not None,
            ranks=wanted.has_ranks,
        )
        is_apart = settings.is_served or settings.memory_bytes is not None  # all that this process keeps counts
        measure = measuring_process.measure_apart if is_apart else measured_for_start
        return machine_for_start(cache_folder(settings.cache_dir), needs, measure=measure, on_step=on_step)

    return resolve(settings, usage, machine_of=machine, resources=here).plan


def plan_for(request: PlanRequest, on_step: OnStep = lambda _: None) -> described.Planned:
    """Return the best plan for a request, what bounds it and what would help.

    Blocks: for some seconds, more if this machine is measured first.
    Raises: CapacityError if nothing fits; CheckpointError, ConfigError.
    """
    settings = request.settings
    if settings.model is None:
        raise ConfigError("no model is named")
    _check_device(settings, is_here=request.machine is None)
    _check_threads(settings)
    if request.machine is None and bare_config(settings.model) is None and not _device_name(settings):
        found = _plan_here(request, on_step)
    else:
        found = _plan_described(request, on_step)
    on_step("what would help")
    forecast = found.plan.forecast
    assert forecast is not None, "the machine is known"
    forecast = dataclasses.replace(
        forecast,
        bottleneck=sensitivity.bottleneck(found.model, forecast.policy),
        helps=sensitivity.helps(found.model, found.objective),
    )
    return dataclasses.replace(found, plan=dataclasses.replace(found.plan, forecast=forecast))


def _plan_described(request: PlanRequest, on_step: OnStep) -> described.Planned:
    """Plan for a machine in a file; or for this one, with its GPU or a model known by its shape alone."""
    settings = request.settings
    named = None if request.machine is None else machine_files.load_machine(request.machine)
    if named is not None and settings.device == "cpu":
        named = named.without_device()

    def machine(wanted: Wanted) -> Machine:
        found = named or _with_device(_measured_here(request, wanted, on_step), settings, on_step)
        on_step("the best policy")
        return found

    has_device = bool(_device_name(settings)) if named is None else named.has(DEVICE)
    return described.plan_described(
        settings,
        request.usage,
        machine,
        has_device=has_device,
        has_bfloat16=not has_device or _has_bfloat16(named, settings),
        routing=request.routing,
    )


def _has_bfloat16(named: Machine | None, settings: Settings) -> bool:
    """Return whether the GPU that is planned for computes bfloat16 fast."""
    if named is None:
        return host_resources(settings.device).has_bfloat16
    return processor_of(named.level(DEVICE)).has_bfloat16


def _plan_here(request: PlanRequest, on_step: OnStep) -> described.Planned:
    settings, usage = request.settings, request.usage
    measured: list[Machine] = []

    def machine(wanted: Wanted) -> Machine:
        measured.append(_measured_here(request, wanted, on_step))
        on_step("the best policy")
        return measured[-1]

    with _cautious(measured):
        resolved = resolve(settings, usage, machine_of=machine, routing=request.routing)
    if resolved.config.device != "cpu":
        on_gpu = dataclasses.replace(settings, device=resolved.config.device)
        found = _plan_described(dataclasses.replace(request, settings=on_gpu), on_step)
        why = tuple(it for it in resolved.plan.reasons if it[0] == "device")
        return dataclasses.replace(found, plan=dataclasses.replace(found.plan, reasons=(*why, *found.plan.reasons)))
    if resolved.estimator is None:
        raise ConfigError(
            "this machine's speed cannot be measured for these settings: its CPU kernels do not compute. Plan for a "
            "described machine (--machine t4, or a file)"
        )
    objective = usage.objective(resolved.estimator.memory_limits)
    return described.Planned(resolved.plan, resolved.estimator.costs(usage.workload), objective, resolved.estimator)


@contextmanager
def _cautious(measured: list[Machine]) -> Iterator[None]:
    """Have a refusal name the measurements that it rests on, if they were disturbed."""
    try:
        yield
    except CapacityError as error:
        if not measured or not was_disturbed(measured[-1]):
            raise
        renew = "`moeflow plan --recalibrate` measures it again, while nothing else runs"
        raise CapacityError(f"{error}. This machine was {how_measured(measured[-1])}: {renew}") from error


def _measured_here(request: PlanRequest, wanted: Wanted, on_step: OnStep) -> Machine:
    """Return this machine. Blocks: for some seconds if it was never measured, or not for such a model."""
    settings, here = request.settings, host_resources()
    folder = cache_folder(settings.cache_dir)
    machine = this_machine(
        folder,
        num_threads=settings.num_threads or here.num_cores,
        ram_bytes=here.available_bytes,
        shapes=shapes_of(wanted.costs),
        needs_ranks=wanted.has_ranks,
        recalibrate=request.recalibrate,
        on_step=on_step,
    )
    packed = wanted.packed_file
    packed_bytes = packed.stat().st_size if packed is not None and packed.exists() else 0
    room = max(shutil.disk_usage(existing_folder(folder)).free + packed_bytes, 1)
    levels = tuple(dataclasses.replace(it, capacity_bytes=room) if it.name == DISK else it for it in machine.levels)
    return _with_file_link(dataclasses.replace(machine, levels=levels), packed, on_step)


def _with_file_link(machine: Machine, file: Path | None, on_step: OnStep) -> Machine:
    """Return a machine whose disk is as fast as a file is read, which may lie on another one; None: as it is."""
    if file is None or not file.exists():
        return machine
    on_step("how fast the packed weights are read")
    link = disk_rates.file_link(file)
    if link is None:
        return machine
    return dataclasses.replace(machine, links=(*(it for it in machine.links if it.source != DISK), link))


def _with_device(machine: Machine, settings: Settings, on_step: OnStep) -> Machine:
    """Return a machine with the GPU that the settings name, measured; none: as it is. Blocks: for about a second."""
    if not _device_name(settings):
        return machine
    name, memory_bytes = parse_cuda_device(settings.device)
    on_step(f"{name} and its link")
    limit = settings.device_memory_bytes or host_resources(settings.device).accelerator_free_bytes
    level, *links = calibrate_device.measure_device(torch.device(name), memory_bytes or limit)
    return dataclasses.replace(machine, levels=(*machine.levels, level), links=(*machine.links, *links), num_devices=1)


def _device_name(settings: Settings) -> str:
    """Return the GPU that is to be planned for; empty: the processor."""
    return "" if settings.device in ("auto", "cpu") else settings.device


def _check_device(settings: Settings, *, is_here: bool) -> None:
    """Raises: ConfigError for a device that cannot be planned for; `is_here`: on this machine."""
    name = _device_name(settings)
    if not name:
        return
    if name.split(":")[0] != CUDA:
        raise ConfigError(
            f"--device {name} cannot be planned for: plan for the processor, a GPU (cuda) or --machine t4"
        )
    if is_here and (here := host_resources(name)).accelerator is None:
        raise ConfigError(
            f"--device {name}: {here.why_no_accelerator}. Plan for a described GPU (--machine t4, or a file)"
        )


def _check_threads(settings: Settings) -> None:
    """Raises: ConfigError if more threads are to be planned for than there are cores."""
    num_cores = host_resources().num_cores
    if (settings.num_threads or 0) > num_cores:
        raise ConfigError(
            f"{settings.num_threads} threads (--threads) are asked for, but this machine has {num_cores} cores, and "
            f"kernels wait for each other: use at most {num_cores}"
        )
