"""From what the user set to a plan: after `resolve`, nothing is left on "auto".

Only headers are read, and once; what cannot fit is refused before loading.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import msgspec

from moeflow.core.engine_config import EngineConfig
from moeflow.core.errors import CapacityError, ConfigError
from moeflow.core.plan import Plan
from moeflow.kernels.on_demand import import_torch, on_demand
from moeflow.parallel.blocks import shape_of_rank
from moeflow.planner.best_device import BestDevice, made_plan
from moeflow.planner.choices.device_offload import (
    check_pipelines,
    computes_in_torch,
    device_overrides,
    settings_of_host,
    with_pipeline,
)
from moeflow.planner.choices.offload_plan import OffloadOverrides, costs_of
from moeflow.planner.choices.processor_choice import Reasons
from moeflow.planner.choices.rank_choice import explain_ranks
from moeflow.planner.costs.routing_profile import RoutingProfile
from moeflow.planner.decision import Decision
from moeflow.planner.estimate import Estimator
from moeflow.planner.hardware.host import HostResources, host_resources
from moeflow.planner.host_forecast import MachineOf, Wanted, unmeasured
from moeflow.planner.model_files import opened_model
from moeflow.planner.usage import SERVING, Usage
from moeflow.settings.settings import Settings

with on_demand(__name__):
    from moeflow.planner import offload_estimate, pipeline_choice
    from moeflow.planner.choices import device_ranks


class Resolved(msgspec.Struct, frozen=True):
    """A plan, and what predicts for its configuration; None where the machine's speed is not known."""

    plan: Plan
    estimator: Estimator | offload_estimate.OffloadEstimator | None

    @property
    def config(self) -> EngineConfig:
        """What the engine runs with."""
        return self.plan.config


def resolve(
    settings: Settings,
    usage: Usage = SERVING,
    *,
    machine_of: MachineOf = unmeasured,
    resources: HostResources | None = None,
    routing: RoutingProfile | None = None,
    needs_weights: bool = True,
) -> Resolved:
    """Turn settings into a plan for this model on this machine, or on one with other `resources`.

    `machine_of` returns how fast the machine is; None: unknown, and what the user leaves open is left to defaults.
    `routing` None: learnt from the model's routers. `needs_weights`: False if the model's shape alone will do.

    Raises: ConfigError for a setting that makes no sense, CapacityError if model or cache do not fit,
    CheckpointError if the model cannot be read. `settings.model` must name a path.
    """
    if settings.model is None:
        raise ConfigError("no model is named")
    settings.check_counts()
    resources = resources or resources_for(settings)
    try:
        return _resolve(settings, usage, resources, machine_of, routing, needs_weights=needs_weights)
    except CapacityError as error:
        number = settings.num_replicas_here
        if number == 1:
            raise
        fits = _most_replicas(settings, usage, resources, needs_weights=needs_weights)
        would = f"{fits} would" if fits else "nor would one"
        raise CapacityError(f"{number} replicas (--replicas) do not fit, {would}. For each of them: {error}") from None


def resources_for(settings: Settings) -> HostResources:
    """Return what this machine offers. Within a limit, torch counts, which computes with experts from disk."""
    if settings.memory_bytes is not None and not settings.is_served:
        import_torch()
    return host_resources(settings.device, settings.cache_dir)


def _most_replicas(settings: Settings, usage: Usage, resources: HostResources, *, needs_weights: bool) -> int:
    """Return how many replicas fit, of fewer than are asked for."""
    for number in range(settings.num_replicas_here - 1, 0, -1):
        fewer = replace(settings, num_replicas=number)
        with suppress(CapacityError):
            _resolve(fewer, usage, resources, unmeasured, None, needs_weights=needs_weights)
            return number
    return 0


def _resolve(
    settings: Settings,
    usage: Usage,
    resources: HostResources,
    machine_of: MachineOf,
    routing: RoutingProfile | None,
    *,
    needs_weights: bool,
) -> Resolved:
    assert settings.model is not None, "checked before"
    overrides = device_overrides(settings, resources)
    with opened_model(settings.model, needs_weights=needs_weights) as (checkpoint, shape):
        if usage.reserves_kv:
            usage.check(shape, settings.model)
        usage = usage.within(settings.max_model_len or shape.max_position)
        if overrides is not None:
            on_host = settings_of_host(settings, overrides, usage)
            in_torch = computes_in_torch(overrides)
            decision = Decision(on_host, usage, resources, checkpoint, shape, unmeasured, offloads_to_torch=in_torch)
            return _offloaded(decision, overrides, settings, machine_of)
        best = BestDevice(
            settings=settings,
            usage=usage,
            resources=resources,
            checkpoint=checkpoint,
            shape=shape,
            machine_of=machine_of,
            routing=routing,
        )
        return Resolved(*best.found())


def _offloaded(decision: Decision, overrides: OffloadOverrides, settings: Settings, machine_of: MachineOf) -> Resolved:
    """Return a plan whose passes go through a pipeline, the best one where the machine's speed is known."""
    config, usage, shape = decision.config(), decision.usage, decision.shape
    check_pipelines(shape)
    why: Reasons = []
    if (number := settings.num_ranks or 1) > 1:
        num_gpus = len(decision.resources.accelerators_free_bytes)
        parallel = device_ranks.pipeline_ranks(settings, shape, overrides, num_gpus)
        config = replace(config, parallel=parallel, num_threads=max(config.num_threads // number, 1))
        explain_ranks(parallel, shape, why, on_devices=True)
    costs, own = costs_of(shape, config), costs_of(shape_of_rank(shape, config.parallel), config)
    machine = machine_of(Wanted(costs=costs, packed_file=None))
    if machine is not None:
        machine = pipeline_choice.with_devices(
            machine, overrides.device, number, decision.resources, settings.cache_dir
        )
        overrides, tried = pipeline_choice.choose_pipeline(overrides, costs, config.scheduler, machine, usage, own)
        why += tried
    config, reasons = with_pipeline(config, overrides, shape)
    plan = made_plan(config, settings, usage, [*decision.reasons, *why, *reasons])
    if machine is None:
        return Resolved(plan, None)
    estimator = offload_estimate.OffloadEstimator(config, shape, machine)
    return Resolved(estimator.complete(plan), estimator)
