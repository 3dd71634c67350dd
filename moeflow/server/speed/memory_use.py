"""The main memory of a server's processes, and what they hold in it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import psutil

from moeflow.core.engine_messages import EngineStats
from moeflow.planner.costs.process_memory import resident_bytes
from moeflow.planner.hardware.host import host_resources
from moeflow.planner.served.served_estimate import ServedEstimate


class MemoryUse(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes in main memory. What the parts add up to is what the processes hold."""

    limit_bytes: int  # that the user set for this model, or the machine's memory
    is_limit_set: bool
    used_bytes: int  # by the server's processes, those of all its models included
    weights_bytes: int
    kv_used_bytes: int  # keys and values of running requests
    kv_cached_bytes: int  # of earlier prompts; free on demand
    other_bytes: int  # processes, work space, other models
    kv_free_bytes: int  # that keys and values may still take
    free_bytes: int  # of the machine, within limits of control groups
    kv_tokens_free: int  # that more requests, or longer ones, may have now
    tokens_in_free_bytes: (
        int | None
    )  # keys and values that the machine's free memory would hold; None: they are elsewhere


def memory_use(estimate: ServedEstimate, stats: EngineStats, processes: Sequence[psutil.Process]) -> MemoryUse:
    """Return the memory of these processes, which are all of the server, now."""
    config, costs = estimate.plan.config, estimate.costs
    here = host_resources()
    used = _used_bytes(estimate, processes)
    block_size = config.scheduler.block_size
    is_here = config.device == "cpu" and config.offload is None
    block_bytes = round(block_size * costs.kv_bytes) if is_here else 0
    kv_used, kv_cached = stats.kv_blocks_used * block_bytes, stats.kv_blocks_cached * block_bytes
    num_free = max(stats.kv_blocks_total - stats.kv_blocks_used, 0)
    weights = min(_weights_bytes(estimate, stats) if is_here else 0, max(used - kv_used - kv_cached, 0))
    return MemoryUse(
        limit_bytes=config.memory.limit_bytes if config.memory is not None else here.total_bytes,
        is_limit_set=config.memory is not None,
        used_bytes=used,
        weights_bytes=weights,
        kv_used_bytes=kv_used,
        kv_cached_bytes=kv_cached,
        other_bytes=max(used - weights - kv_used - kv_cached, 0),
        kv_free_bytes=max(num_free - stats.kv_blocks_cached, 0) * block_bytes,
        free_bytes=here.available_bytes,
        kv_tokens_free=num_free * block_size,
        tokens_in_free_bytes=int(here.available_bytes / costs.kv_bytes) if is_here and costs.kv_bytes else None,
    )


def _used_bytes(estimate: ServedEstimate, processes: Sequence[psutil.Process]) -> int:
    """Return what processes hold in all; weights that several engines map count once, as in the plan."""
    config, number = estimate.plan.config, estimate.plan.num_replicas
    in_common = (number - 1) * estimate.costs.model_bytes if config.packed_file else 0.0
    return max(resident_bytes(process.pid for process in processes) - round(in_common), 0)


def _weights_bytes(estimate: ServedEstimate, stats: EngineStats) -> int:
    """Return the weights in memory: of experts that come from disk, those that have a place."""
    costs, config = estimate.costs, estimate.plan.config
    if config.experts is None:
        copies = 1 if config.packed_file else estimate.plan.num_replicas
        return round(costs.model_bytes * copies)
    return round(costs.model_bytes - costs.experts_bytes) + stats.experts_in_slots * config.experts.slab_bytes
