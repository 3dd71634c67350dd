"""Decides what computes a model on this machine: a GPU that holds it, a GPU that shares experts, or the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import msgspec

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.core.engine_config import EngineConfig
from moeflow.core.errors import CapacityError, ConfigError
from moeflow.core.hardware import DISK
from moeflow.core.model_config import ModelConfig
from moeflow.core.plan import Plan
from moeflow.kernels.cpu import extension
from moeflow.kernels.on_demand import on_demand
from moeflow.planner.choices.gpu_limits import check_on_cpu, why_not_automatic, why_too_short
from moeflow.planner.choices.join_choice import choose_node_replicas, explain_nodes
from moeflow.planner.choices.processor_choice import Reasons
from moeflow.planner.costs.routing_profile import RoutingProfile
from moeflow.planner.decision import Decision
from moeflow.planner.estimate import Estimator
from moeflow.planner.hardware.host import HostResources
from moeflow.planner.host_forecast import MachineOf
from moeflow.planner.usage import Usage
from moeflow.settings.settings import Settings, to_plain

with on_demand(__name__):
    from moeflow.planner.choices import hybrid_choice

_NOR_SHARED: Final = "nor can the CPU compute some of the experts"
Found = tuple[Plan, Estimator | None]  # None: the speed of what computes is unknown


class BestDevice(msgspec.Struct, frozen=True, kw_only=True):
    """The choice of a device for one model."""

    settings: Settings
    usage: Usage
    resources: HostResources
    checkpoint: Checkpoint | None
    shape: ModelConfig
    machine_of: MachineOf
    routing: RoutingProfile | None

    def found(self) -> Found:
        """Return the plan for the asked device; for "auto" for the best one.

        Raises: as `Decision.config`; ConfigError for settings of a GPU where the CPU computes.
        """
        if self.settings.device == "auto":
            return self._automatic()
        try:
            return self._decided(self.settings)
        except CapacityError as error:
            if self.settings.device == "cpu":
                raise
            why = str(error)
            if found := self._over_gpus(self.settings, why):
                return found
            if not self._can_share(self.settings):
                raise
        try:
            found = self._decided(self.settings, is_hybrid=True)
        except CapacityError as error:
            raise CapacityError(f"{why}; {_NOR_SHARED}: {error}") from None
        return _because(found, f"{found[0].config.device}: the CPU computes some experts, since {why}")

    def _automatic(self) -> Found:
        """Return the plan for a GPU that runs the model as asked, alone or with the CPU, else for the CPU."""
        settings, gpu = self.settings, self.resources.accelerator
        if reason := why_not_automatic(settings, self.shape, self.resources):
            return self._on_cpu(reason)
        assert gpu is not None, "without a GPU there is a reason"
        try:
            found = self._decided(replace(settings, device=gpu))
            reason = why_too_short(found[0].config, settings, self.shape)
        except CapacityError as error:
            reason = f"{gpu} does not hold the model: {error}"
        else:
            if not reason:
                return _because(found, f"{gpu}: it holds the model")
        if over := self._over_gpus(replace(settings, device=gpu), reason):
            return over
        if not self._can_share(settings):
            return self._on_cpu_instead(reason)
        try:
            shared = self._decided(replace(settings, device=gpu), is_hybrid=True)
        except CapacityError as error:
            return self._on_cpu_instead(f"{reason}; {_NOR_SHARED}: {error}")
        return self._faster(shared, reason)

    def _over_gpus(self, settings: Settings, why_smaller: str) -> Found | None:
        """Return the plan for the fewest GPUs that hold the model; None: there are none, or the user sets a number.

        The number is a power of two, which usually divides heads and units.
        """
        if settings.num_ranks is not None:
            return None
        for power in range(1, len(self.resources.accelerators_free_bytes).bit_length()):
            try:
                found = self._decided(replace(settings, num_ranks=2**power))
            except (CapacityError, ConfigError):
                continue
            if not why_too_short(found[0].config, settings, self.shape):
                return _because(found, f"{settings.device} and {2**power - 1} more share each layer: {why_smaller}")
        return None

    def _faster(self, shared: Found, why_smaller: str) -> Found:
        """Return the plan with experts shared by a GPU and the CPU, or the CPU's own if that is faster."""
        gpu = shared[0].config.device
        if self.settings.gpu_memory_bytes is not None:
            return _because(shared, f"{gpu}: the CPU computes some experts, since {why_smaller}")
        try:
            alone = self._on_cpu(why_smaller)
        except (CapacityError, ConfigError) as error:  # too little main memory, or settings of GPUs
            return _because(shared, f"{gpu}: the CPU computes some experts, but not all: {error}")
        if shared[0].forecast is None or alone[0].forecast is None:
            return alone
        compared = hybrid_choice.Compared.of(shared[0].forecast, alone[0].forecast, self.usage)
        return _because(shared if compared.is_worth else alone, compared.reason(gpu))

    def _on_cpu_instead(self, reason: str) -> Found:
        """Return the CPU's plan where a GPU is too small. Raises: CapacityError if the user limits a GPU."""
        if self.settings.gpu_memory_bytes is not None:
            raise CapacityError(reason)
        return self._on_cpu(reason)

    def _on_cpu(self, reason: str) -> Found:
        check_on_cpu(self.settings, reason)
        return _because(self._decided(replace(self.settings, device="cpu")), f"cpu: {reason}")

    def _can_share(self, settings: Settings) -> bool:
        return hybrid_choice.can_be_hybrid(settings, self.shape) and (
            self.checkpoint is None or extension.is_available()
        )

    def _decided(self, settings: Settings, *, is_hybrid: bool = False) -> Found:
        """Return the plan for a device, and what predicts for it."""
        decision = Decision(
            settings,
            self.usage,
            self.resources,
            self.checkpoint,
            self.shape,
            self.machine_of,
            routing=self.routing,
        )
        decision.is_hybrid = is_hybrid
        config = decision.config()
        num_ranks = 1 if config.parallel is None else config.parallel.num_ranks
        nodes = choose_node_replicas(settings, num_ranks)
        if nodes is not None:
            explain_nodes(nodes, num_ranks, decision.reasons)
        plan = replace(
            made_plan(config, self.settings, self.usage, decision.reasons),
            num_replicas=decision.num_replicas,
            node_replicas=nodes,
            memory_bytes=decision.memory_bytes,
        )
        machine = decision.host.machine
        if machine is None or self.shape.is_encoder_only or (config.experts is not None and not machine.has(DISK)):
            return plan, None
        estimator = Estimator(
            config,
            self.shape,
            machine,
            is_served=settings.is_served,
            routing=decision.host.routing,
            num_replicas=decision.num_replicas,
        )
        return estimator.complete(plan), estimator


def _because(found: Found, reason: str) -> Found:
    """Return a plan with the reason for its device."""
    plan, estimator = found
    others = (it for it in plan.reasons if it[0] != "device")
    return replace(plan, reasons=(*others, ("device", reason))), estimator


def made_plan(config: EngineConfig, settings: Settings, usage: Usage, reasons: Reasons) -> Plan:
    """Return a configuration of this machine as a plan."""
    return Plan(
        config=config,
        settings=to_plain(settings),
        goal=usage.goal,
        workload=usage.workload,
        machine="this machine",
        reasons=tuple(reasons),
    )
