"""From what the user set to a plan: after `resolve`, nothing is left on "auto".

Only headers are read, and once; what cannot fit is refused before loading.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass

from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.engine_config import EngineConfig
from moeflow.core.errors import ConfigError
from moeflow.core.hardware import DISK
from moeflow.core.plan import Plan
from moeflow.models.registry import read_model_config
from moeflow.planner.choices.device_offload import computes_in_torch, device_overrides, settings_of_host, with_pipeline
from moeflow.planner.choices.processor_choice import Reasons
from moeflow.planner.costs.routing_profile import RoutingProfile
from moeflow.planner.decision import Decision, MachineOf, unmeasured
from moeflow.planner.estimate import Estimator
from moeflow.planner.hardware.host import HostResources, host_resources
from moeflow.planner.settings import Settings
from moeflow.planner.usage import SERVING, Usage


@dataclass(frozen=True, slots=True)
class Resolved:
    """A plan, and what predicts for its configuration; None where the machine's speed is not known."""

    plan: Plan
    estimator: Estimator | None

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
) -> Resolved:
    """Turn settings into a plan for this model on this machine.

    `machine_of` returns how fast the machine is; None: unknown, and what the user leaves open is left to defaults.
    `routing` None: what was learnt of the model's routers.

    Raises: ConfigError for a setting that makes no sense, CapacityError if model or cache do not fit,
    CheckpointError if the model cannot be read. `settings.model` must name a path.
    """
    if settings.model is None:
        raise ConfigError("no model is named")
    settings.check_counts()
    resources = resources or host_resources()
    overrides = device_overrides(settings, resources)
    with closing(open_checkpoint(settings.model)) as checkpoint:
        shape = read_model_config(checkpoint)
        if usage.reserves_kv:
            usage.check(shape, settings.model)
        usage = usage.within(settings.max_model_len or shape.max_position)
        if overrides is not None:
            on_host = settings_of_host(settings, overrides)
            in_torch = computes_in_torch(overrides)
            decision = Decision(on_host, usage, resources, checkpoint, shape, unmeasured, offloads_to_torch=in_torch)
            config, reasons = with_pipeline(decision.config(), overrides, shape)
            return Resolved(_plan(config, usage, [*decision.reasons, *reasons]), None)
        decision = Decision(settings, usage, resources, checkpoint, shape, machine_of, routing=routing)
        plan = _plan(decision.config(), usage, decision.reasons)
        if decision.machine is None or (plan.config.experts is not None and not decision.machine.has(DISK)):
            return Resolved(plan, None)
        estimator = Estimator(
            plan.config, shape, decision.machine, is_served=settings.is_served, routing=decision.routing
        )
        return Resolved(estimator.complete(plan), estimator)


def _plan(config: EngineConfig, usage: Usage, reasons: Reasons) -> Plan:
    return Plan(config=config, goal=usage.goal, workload=usage.workload, machine="this machine", reasons=tuple(reasons))
