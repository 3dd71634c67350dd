"""Two ways to a plan: for `moeflow plan`, with what bounds it and what would help; and quickly, before a start."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Final

from moeflow.core.cache_dir import cache_folder, existing_folder
from moeflow.core.errors import CapacityError, ConfigError
from moeflow.core.hardware import DEVICE, DISK, Machine
from moeflow.core.offload_config import CUDA, PREFIX, parse_cuda_device
from moeflow.core.plan import HYBRID, RESIDENT, Plan
from moeflow.kernels.on_demand import on_demand
from moeflow.planner.choices.gpu_limits import gpu_refusal, why_too_few
from moeflow.planner.choices.memory_allowance import allowed_bytes
from moeflow.planner.costs.roofline import processor_of
from moeflow.planner.costs.routing_profile import RoutingProfile
from moeflow.planner.hardware.host import HostResources, has_gpu_driver, host_of, host_resources
from moeflow.planner.hardware.kernel_bench import shapes_of
from moeflow.planner.hardware.this_machine import (
    MachineNeeds,
    how_measured,
    machine_for_start,
    measured_for_start,
    this_machine,
    was_disturbed,
)
from moeflow.planner.host_forecast import MachineOf, Wanted
from moeflow.planner.model_files import bare_config, opened_model
from moeflow.planner.resolve import Resolved, resolve, resources_for
from moeflow.planner.usage import SERVING, Usage
from moeflow.settings.settings import Settings

with on_demand(__name__):
    import shutil

    from moeflow.planner import described, offload_estimate
    from moeflow.planner.choices import hybrid_choice
    from moeflow.planner.hardware import disk_rates, gpu_figures, machine_files, measuring_process
    from moeflow.planner.search import sensitivity

_NEARLY: Final = 0.9  # of a GPU's free memory: another GPU with as much is used like it
_SHAPE_ON_GPU: Final = "without weights here, a model is planned for a GPU only if --device names it"
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
    is_apart = settings.is_served or settings.memory_bytes is not None  # all that this process keeps counts
    return resolve(
        settings, usage, machine_of=machine_now(settings, here, is_apart=is_apart, on_step=on_step), resources=here
    ).plan


def machine_now(
    settings: Settings, here: HostResources, *, is_apart: bool, on_step: OnStep = lambda _: None
) -> MachineOf:
    """Return what measures this machine quickly, where it was never measured, and knows it else.

    `is_apart`: in a process of its own.
    """

    def machine(wanted: Wanted) -> Machine:
        needs = MachineNeeds(
            num_threads=settings.num_threads or here.num_cores,
            ram_bytes=here.available_bytes,
            shapes=tuple(shapes_of(wanted.costs)),
            disk=wanted.packed_file is not None,
            ranks=wanted.has_ranks,
        )
        measure = measuring_process.measure_apart if is_apart else measured_for_start
        machine = machine_for_start(cache_folder(settings.cache_dir), needs, measure=measure, on_step=on_step)
        if not wanted.device:
            return machine
        with suppress(ConfigError):  # of a GPU that cannot be measured: the CPU computes, unless the user names it
            return _with_device(machine, wanted.device, settings, on_step, here)
        return machine

    return machine


def plan_for(request: PlanRequest, on_step: OnStep = lambda _: None) -> described.Planned:
    """Return the best plan for a request, what bounds it and what would help.

    Blocks: for some seconds, more if this machine is measured first.
    Raises: CapacityError if nothing fits; CheckpointError, ConfigError.
    """
    settings = request.settings
    if settings.model is None:
        raise ConfigError("no model is named")
    _check_device(settings, is_here=request.machine is None)
    check_threads(settings, host_resources())
    named = None if request.machine is None else machine_files.load_machine(request.machine)
    has_gpu = bool(_gpu_name(settings)) if named is None else named.has(DEVICE) and settings.device != "cpu"
    why_host = _why_host(settings, named) if has_gpu else "the machine has no GPU"
    found = _plan_host(request, named, on_step, why_host) if why_host else _plan_gpu(request, named, on_step)
    on_step("what would help")
    forecast = found.plan.forecast
    assert forecast is not None, "the machine is known"
    forecast = dataclasses.replace(
        forecast,
        bottleneck=sensitivity.bottleneck(found.model, forecast.policy),
        helps=sensitivity.helps(found.model, found.objective),
    )
    return dataclasses.replace(found, plan=dataclasses.replace(found.plan, forecast=forecast))


def _why_host(settings: Settings, named: Machine | None) -> str:
    """Return why a machine with a GPU computes on its processor; empty: the GPU runs the model as asked, or is named.

    Raises: CheckpointError if there is no such model.
    """
    if settings.device != "auto" or named is None:
        return ""
    with opened_model(str(settings.model), needs_weights=False) as (_, shape):
        refusal = gpu_refusal(settings, shape)
    return refusal.reason if refusal else why_too_few(settings, named.num_devices)


def _plan_gpu(request: PlanRequest, named: Machine | None, on_step: OnStep) -> described.Planned:
    """Plan for a machine with a device; for its processor if the user names no device and that one does not suffice."""
    is_open = request.settings.device == "auto" and request.settings.gpu_memory_bytes is None
    try:
        found = _plan_device(request, named, on_step)
    except CapacityError as error:
        if not is_open:
            raise
        return _plan_host(request, named, on_step, f"its GPU is too small or too slow: {error}")
    return _faster(request, named, on_step, found) if is_open and found.plan.pipeline == HYBRID else found


def _faster(
    request: PlanRequest, named: Machine | None, on_step: OnStep, hybrid: described.Planned
) -> described.Planned:
    """Return a plan with experts shared by a GPU and the processor, or the processor's own if that is faster."""
    try:
        alone = _plan_host(request, named, on_step, "the two are compared")
    except CapacityError:
        return hybrid
    assert hybrid.plan.forecast is not None, "the machine is known"
    assert alone.plan.forecast is not None, "likewise"
    compared = hybrid_choice.Compared.of(hybrid.plan.forecast, alone.plan.forecast, request.usage)
    faster = hybrid if compared.is_worth else alone
    others = (it for it in faster.plan.reasons if it[0] != "device")
    plan = dataclasses.replace(faster.plan, reasons=(*others, ("device", compared.reason(hybrid.plan.config.device))))
    return dataclasses.replace(faster, plan=plan)


def _plan_device(request: PlanRequest, named: Machine | None, on_step: OnStep) -> described.Planned:
    """Plan for a machine with a device, which has a name; None: for this one and its GPU."""
    settings = request.settings
    if named is not None:
        named = _limited(named, settings)

    def machine(wanted: Wanted) -> Machine:
        found = named or _measured_here(request, wanted, on_step)
        if named is None and _gpu_name(settings):
            found = _with_device(found, settings.device, settings, on_step, recalibrate=request.recalibrate)
        on_step("the best policy")
        return found

    found = described.plan_described(
        settings, request.usage, machine, has_bfloat16=_has_bfloat16(named, settings), routing=request.routing
    )
    if named is not None or found.plan.config.offload is None:
        return found
    estimator = offload_estimate.OffloadEstimator(found.plan.config, found.model.costs.shape, found.model.machine)
    return dataclasses.replace(found, estimator=estimator)


def _has_bfloat16(named: Machine | None, settings: Settings) -> bool:
    """Return whether the GPU that is planned for computes bfloat16 fast."""
    if named is None:
        return host_resources(settings.device, settings.cache_dir).has_bfloat16
    return processor_of(named.level(DEVICE)).has_bfloat16


def _plan_host(request: PlanRequest, named: Machine | None, on_step: OnStep, why_host: str) -> described.Planned:
    """Plan for a machine that computes on its processor, which has a name; None: for this one.

    If this machine has a GPU that holds the model, the plan is for that GPU.
    """
    usage, measured = request.usage, list[Machine]()
    if named is not None and named.has(DEVICE):
        named = named.without_device()

    def machine(wanted: Wanted) -> Machine:
        found = named or _measured_here(request, wanted, on_step)
        if wanted.device:
            found = _with_device(found, wanted.device, request.settings, on_step, recalibrate=request.recalibrate)
        measured.append(found)
        on_step("the best policy")
        return measured[-1]

    with _cautious(measured):
        resolved = _resolve_host(request, _described_resources(request, named, why_host), machine)
    if resolved.config.device != "cpu":
        on_gpu = dataclasses.replace(request.settings, device=resolved.config.device)
        found = _plan_device(dataclasses.replace(request, settings=on_gpu), None, on_step)
        why = dict(resolved.plan.reasons)["device"]
        if found.plan.pipeline != RESIDENT and resolved.config.hybrid is None:
            why += f", but not beside this plan's batch: {found.plan.pipeline} moves what has no room"
        reasons = (("device", why), *found.plan.reasons)
        return dataclasses.replace(found, plan=dataclasses.replace(found.plan, reasons=reasons))
    if resolved.estimator is None:
        raise ConfigError(
            "this machine's speed cannot be measured for these settings: its CPU kernels do not compute. Plan for a "
            "described machine (--machine t4, or a file)"
        )
    offload = resolved.config.offload
    objective = usage.objective(resolved.estimator.memory_limits, has_device=offload is not None)
    if offload is not None:
        objective = dataclasses.replace(objective, num_sequences=resolved.config.scheduler.max_num_seqs)
    return described.Planned(resolved.plan, resolved.estimator.costs(usage.workload), objective, resolved.estimator)


def _described_resources(request: PlanRequest, named: Machine | None, why_host: str) -> HostResources | None:
    """Return the resources of a named machine, or of this one for a shape; None: it runs the model."""
    if named is not None:
        return host_of(named, why_host)
    if bare_config(str(request.settings.model)) is None:
        return None
    here = host_resources()
    return dataclasses.replace(here, why_no_accelerator=_SHAPE_ON_GPU) if has_gpu_driver() else here


def _resolve_host(request: PlanRequest, resources: HostResources | None, machine_of: MachineOf) -> Resolved:
    """Return the plan. Where nothing runs, experts that do not fit in memory come from disk, without a limit too.

    `resources` None: this machine's.
    """

    def resolved(settings: Settings) -> Resolved:
        return resolve(
            settings,
            request.usage,
            machine_of=machine_of,
            resources=resources,
            routing=request.routing,
            needs_weights=False,
        )

    settings = request.settings
    try:
        return resolved(settings)
    except CapacityError:
        if resources is None or settings.memory_bytes is not None or (settings.num_ranks or 1) > 1:
            raise
        return resolved(dataclasses.replace(settings, memory_bytes=resources.available_bytes))


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


def _with_device(
    machine: Machine,
    device: str,
    settings: Settings,
    on_step: OnStep,
    here: HostResources | None = None,
    *,
    recalibrate: bool = False,
) -> Machine:
    """Return a machine with a GPU as it was measured, again if `recalibrate`; `here` None: ask for its free memory.

    Blocks: for some seconds if it measures. Raises: ConfigError if it cannot be measured.
    """
    name, memory_bytes = parse_cuda_device(device)
    on_step(f"{name} and its link")
    here = here or host_resources(device, settings.cache_dir)
    memory_bytes = memory_bytes or settings.gpu_memory_bytes or here.accelerator_free_bytes
    file = gpu_figures.figures_file(settings.cache_dir, here, name)
    figures = gpu_figures.gpu_figures(name, memory_bytes, file, recalibrate=recalibrate)
    equal = list(takewhile(lambda free: free >= _NEARLY * memory_bytes, here.accelerators_free_bytes))
    return gpu_figures.with_gpu(machine, figures, max(len(equal), 1))


def _limited(machine: Machine, settings: Settings) -> Machine:
    """Return a machine with as much device memory as the user allows. Raises: CapacityError if it has less."""
    device = _gpu_name(settings)
    asked = (parse_cuda_device(device)[1] if device else None) or settings.gpu_memory_bytes
    memory_bytes = allowed_bytes("device memory", asked, machine.level(DEVICE).capacity_bytes)
    levels = (
        dataclasses.replace(it, capacity_bytes=memory_bytes) if it.name == DEVICE else it for it in machine.levels
    )
    return dataclasses.replace(machine, levels=tuple(levels))


def _gpu_name(settings: Settings) -> str:
    """Return the GPU that is to be planned for; empty: the processor, or a device that it emulates."""
    return "" if settings.device in ("auto", "cpu") or _is_emulated(settings) else settings.device


def _is_emulated(settings: Settings) -> bool:
    return settings.device.split(":")[0] == PREFIX


def _check_device(settings: Settings, *, is_here: bool) -> None:
    """Raises: ConfigError for a device that cannot be planned for; `is_here`: on this machine."""
    if _is_emulated(settings) and not is_here:
        raise ConfigError(f"--device {settings.device} is emulated by this machine; remove --machine, or name a GPU")
    name = _gpu_name(settings)
    if not name:
        return
    if name.split(":")[0] != CUDA:
        raise ConfigError(
            f"--device {name} cannot be planned for: plan for the processor, a GPU (cuda) or --machine t4"
        )
    if is_here and (here := host_resources(name, settings.cache_dir)).accelerator is None:
        raise ConfigError(
            f"--device {name}: {here.why_no_accelerator}. Plan for a described GPU (--machine t4, or a file)"
        )


def check_threads(settings: Settings, here: HostResources) -> None:
    """Raises: ConfigError if a plan has more threads than this machine has cores."""
    if (settings.num_threads or 0) > here.num_cores:
        raise ConfigError(
            f"the plan needs {settings.num_threads} threads, but this machine has {here.num_cores} cores, and kernels "
            f"wait for each other: set at most {here.num_cores} (--threads)"
        )
