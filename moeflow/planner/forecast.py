"""What a policy brings on a machine, as a plan holds it: speeds with intervals, memory, and where experts live."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from moeflow.core.hardware import DEVICE, DISK, RAM
from moeflow.core.plan import Estimate, Forecast, Policy, TierUse
from moeflow.planner.costs.cost_model import CostModel, IntegerPolicy
from moeflow.planner.resident_experts import share_on_device

DISK_UNCERTAINTY: Final = 0.3  # what hits the expert cache depends on the text
MEMORY_UNCERTAINTY: Final = 0.05


def forecast(
    model: CostModel, policy: Policy, memory_limits: Mapping[str, int], *, maps_weights: bool = False
) -> Forecast:
    """Return what a policy brings, with intervals; `memory_limits` are those of an engine below what tiers hold.

    `maps_weights`: several engines have their weights in the same memory.
    """
    replicas = model.sharing.num_replicas
    in_common = (replicas - 1) * model.sharing.weight_bytes(model.costs) if maps_weights else 0.0
    uncertainty = max(model.machine.uncertainty, DISK_UNCERTAINTY if policy.experts_on_disk else 0.0)
    it, number = model.predict(policy), policy.batch_size * replicas
    alone = model.predict(replace(policy, batch_size=1, micro_batch=1))
    levels = {level.name: level.capacity_bytes for level in model.machine.levels}
    capacities = {tier: min(size, replicas * memory_limits.get(tier, size)) for tier, size in levels.items()}
    memory = {tier: size * replicas - (in_common if tier == RAM else 0.0) for tier, size in it.memory.items()}
    return Forecast(
        policy=policy,
        prefill_tokens_per_s=Estimate.within(number * model.workload.prompt_len / it.prefill_s, uncertainty),
        decode_tokens_per_s=Estimate.within(number / it.decode_s, uncertainty),
        decode_alone_tokens_per_s=Estimate.within(1 / alone.decode_s, uncertainty),
        tokens_per_s=Estimate.within(it.tokens_per_s * replicas, uncertainty),
        time_to_first_token_s=Estimate.within(it.first_token_s, uncertainty),
        all_prompts_s=Estimate.within(it.prefill_s, uncertainty),
        time_per_token_s=Estimate.within(it.decode_s, uncertainty),
        memory=tuple(
            TierUse(tier=tier, peak_bytes=_peak(size, capacities[tier]), capacity_bytes=capacities[tier])
            for tier, size in memory.items()
            if tier in levels and size > 0
        ),
        busy=tuple((name, round(seconds / it.decode_s, 4)) for name, seconds in it.busy.items()),
        expert_places=expert_places(model, policy),
    )


def _peak(num_bytes: float, capacity: int) -> Estimate:
    """Return an interval limited by the memory, which the engine keeps to."""
    estimate = Estimate.within(num_bytes, MEMORY_UNCERTAINTY)
    return replace(estimate, high=max(min(estimate.high, capacity), num_bytes))


def expert_places(model: CostModel, policy: Policy) -> tuple[tuple[str, float], ...]:
    """Return which share of the experts lives where: (tier, share), total 1; nothing for a model without any.

    What else a layer has takes the device's memory first, as all tokens need it.
    """
    costs = model.costs
    if not costs.experts_bytes:
        return ()
    on_device = 0.0
    if model.has_device:
        on_device = share_on_device(costs.layers_bytes, costs.experts_bytes, policy.weights_on_device)
        on_device = min(on_device, 1 - policy.experts_on_disk)
    shares = {DEVICE: on_device, RAM: 1 - on_device - policy.experts_on_disk, DISK: policy.experts_on_disk}
    present = {level.name for level in model.machine.levels}
    return tuple((tier, max(round(share, 6), 0.0)) for tier, share in shares.items() if tier in present)


def disk_reasons(model: CostModel, policy: Policy) -> list[tuple[str, str]]:
    """Return how often experts that do not fit into memory are read, and how that is known; nothing if all fit."""
    if not policy.experts_on_disk:
        return []
    reads, _ = model.reads(IntegerPolicy.of(policy))
    missing = reads.num_read(policy.experts_on_disk) / (reads.num_layers * reads.distinct)
    how = f"{missing:.0%} of the {reads.distinct:.0f} a layer that a step uses are read"
    if not model.routing.decode:
        how = f"{missing:.0%} of a step's are read if routers choose evenly (`moeflow pack` learns how they do)"
    return [("experts_on_disk", f"they have no room; {how}")]
