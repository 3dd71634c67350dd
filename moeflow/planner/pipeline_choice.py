"""Chooses the pipeline of a device that is smaller than the model, the micro-batch, and the layers whose KV stay there.

It tries configurations that the engine can run, each with as many experts on the device as fit. The cost model ranks
them. Choices of the user stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Final

import msgspec

from moeflow.core.engine_config import SchedulerConfig
from moeflow.core.errors import CapacityError
from moeflow.core.hardware import DEVICE, Machine, MemoryLevel
from moeflow.core.offload_config import DeviceConfig, EmulatedDeviceConfig
from moeflow.core.plan import Policy
from moeflow.pipeline.catalog import OFFLOADING
from moeflow.planner.choices.offload_plan import OffloadOverrides, plan_offload
from moeflow.planner.choices.processor_choice import Reasons
from moeflow.planner.costs.cost_model import CostModel
from moeflow.planner.costs.model_costs import ModelCosts
from moeflow.planner.costs.roofline import divided
from moeflow.planner.hardware.emulated_machine import with_emulated_device
from moeflow.planner.hardware.gpu_figures import figures_file, gpu_figures, with_gpu
from moeflow.planner.hardware.host import HostResources
from moeflow.planner.offload_estimate import offload_policy
from moeflow.planner.search.objective import cost_per_token, grid
from moeflow.planner.usage import Usage

MOVES_KV: Final = "flexgen"
KEEPS_KV: Final = "zero-inference"
CANDIDATES: Final = ("cgopipe", MOVES_KV, KEEPS_KV)  # one for each place of attention, keys and values
KV_SHARES: Final = (0.0, 0.25, 0.5, 0.75, 1.0)
NEARLY: Final = 1.02  # of the least time: the choice with the least work is taken
_STEP: Final = 1.5  # of sizes of micro-batches


def choose_pipeline(
    overrides: OffloadOverrides,
    costs: ModelCosts,
    limits: SchedulerConfig,
    machine: Machine,
    usage: Usage,
    own: ModelCosts | None = None,
) -> tuple[OffloadOverrides, Reasons]:
    """Return the fastest choices for `limits.max_num_seqs` requests of the usage, and why.

    `machine` has the devices; `own` are the costs of each one's part, None: there is one. If nothing fits, the
    overrides stay as they are, and allocating explains.
    """
    model = CostModel(machine, costs, usage.workload, num_devices=machine.num_devices)
    goal = "latency" if usage.goal == "latency" else "throughput"
    found: list[tuple[float, OffloadOverrides, Policy]] = []
    for candidate in _candidates(overrides, limits):
        with suppress(CapacityError):
            offload = plan_offload(candidate, own or costs, limits)
            policy = offload_policy(offload, model, limits.max_num_seqs, limits.max_num_batched_tokens)
            found.append((cost_per_token(model, policy, goal), candidate, policy))
    if not found:
        return overrides, []
    near = [one for one in found if one[0] <= NEARLY * min(cost for cost, _, _ in found)]
    cost, best, policy = min(near, key=lambda one: sum(model.predict(one[2]).busy.values()))
    prediction = model.predict(policy)
    busiest = max(prediction.busy, key=lambda name: prediction.busy[name])
    speed = f"{1 / cost:.3g} tokens/s" if goal == "throughput" else f"{cost:.3g} s a step"
    why = f"{len(found)} that fit: the fastest for {policy.batch_size} requests, {speed} expected, bound by {busiest}"
    return best, [("pipelines tried", why)]


def _candidates(overrides: OffloadOverrides, limits: SchedulerConfig) -> Iterator[OffloadOverrides]:
    names: tuple[str, ...] = CANDIDATES if overrides.pipeline is None else (overrides.pipeline,)
    if overrides.hosted_experts:
        names = tuple(name for name in names if OFFLOADING[name].make_sharing_tasks is not None)
    asked_size, asked_kv = overrides.micro_batch_tokens, overrides.resident_kv
    sizes = grid(1, limits.max_num_seqs, _STEP) if asked_size is None else [asked_size]
    for name, size in product(names, sizes):
        if name == KEEPS_KV and asked_kv is not None and overrides.pipeline is None:
            continue  # flexgen has that share, too
        shares = KV_SHARES if name == MOVES_KV and asked_kv is None else (asked_kv,)
        for share in shares:
            yield msgspec.structs.replace(overrides, pipeline=name, micro_batch_tokens=size, resident_kv=share)


def with_devices(
    machine: Machine, device: DeviceConfig, number: int, here: HostResources, cache_dir: Path | None
) -> Machine:
    """Return a machine with so many such devices, each with a link. Blocks: for some seconds on a GPU that
    is measured first.
    """
    if not isinstance(device, EmulatedDeviceConfig):
        file = figures_file(cache_dir, here, device.name)
        return with_gpu(machine, gpu_figures(device.name, device.memory_bytes, file), number)
    found = with_emulated_device(machine, device)
    if number == 1:
        return found
    links = (
        replace(link, is_shared=link.is_shared and DEVICE not in (link.source, link.target)) for link in found.links
    )
    levels = (_of_each(level, device, number) if level.name == DEVICE else level for level in found.levels)
    return replace(found, links=tuple(links), levels=tuple(levels), num_devices=number)


def _of_each(level: MemoryLevel, device: EmulatedDeviceConfig, number: int) -> MemoryLevel:
    """Return one of several emulated devices; without a pace they divide this machine's processor."""
    return level if device.speeds.device_flops else divided(level, number)
