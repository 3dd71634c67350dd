"""A pass whose experts come from disk: those that are there are computed with while the others are read.

What a router chose is known only then, so loading and computing stand for whatever it turns out to be: nothing, a
few experts, or most of a layer in portions. Prefetches wait for nothing but the router, and nothing waits for them.
"""

from __future__ import annotations

from collections.abc import Iterator

from moeflow.core.priority import PREFETCH
from moeflow.pipeline.task import Task, TaskMaker

DISK = "disk"  # the lane that reads experts


def streaming(has_experts: list[bool]) -> Iterator[Task]:
    """Yield a pass over layers with or without experts."""
    make, last = TaskMaker(), None
    for layer, is_routed in enumerate(has_experts):
        for op in ("pre_attention", "attention"):
            last = make(op, layer, after=[last])
            yield last
        if not is_routed:
            last = make("post_attention", layer, after=[last])
            yield last
            continue
        route = make("route", layer, after=[last])
        load = make("load_experts", layer, lane=DISK, after=[route])
        yield from (route, load)
        if any(has_experts[layer + 1 :]):
            yield make("prefetch", layer + 1, lane=DISK, after=[route], priority=PREFETCH)
        resident = make("experts_in_memory", layer, after=[route])
        last = make("experts_that_arrived", layer, after=[resident, load])
        yield from (resident, last)
