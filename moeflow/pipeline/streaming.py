"""Passes whose experts come from disk: those that are there are computed with while the others are read.

What a router chose is known only then, so loading and computing stand for whatever it turns out to be: nothing, a
few experts, or most of a layer in portions. Where few are needed, prefetches wait for nothing but the router, and
nothing waits for them. Where nearly all are, the next layer's reads follow this one's: what they bring is needed.
"""

from __future__ import annotations

from collections.abc import Iterator

from moeflow.core.priority import PREFETCH
from moeflow.pipeline.task import Task, TaskMaker

DISK = "disk"  # the lane that reads experts


def streaming(has_experts: list[bool]) -> Iterator[Task]:
    """Yield both kinds of pass over layers with or without experts, side by side."""
    make = TaskMaker()
    yield from few_experts(has_experts, make)
    yield from nearly_all_experts(has_experts, make)


def few_experts(has_experts: list[bool], make: TaskMaker) -> Iterator[Task]:
    """Yield a pass of few tokens: a decode."""
    last: Task | None = None
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


def nearly_all_experts(has_experts: list[bool], make: TaskMaker) -> Iterator[Task]:
    """Yield a pass of so many tokens that the disk goes from layer to layer by itself: a prefill."""
    last: Task | None = None
    ahead: Task | None = None  # the reads for a layer that began before its router spoke
    for layer, is_routed in enumerate(has_experts):
        for op in ("pre_attention", "attention"):
            last = make(op, layer, after=[last])
            yield last
        if not is_routed:
            last = make("post_attention", layer, after=[last])
            yield last
            continue
        route = make("route", layer, after=[last])
        load = make("load_other_experts", layer, lane=DISK, after=[route, ahead])
        yield from (route, load)
        following = next((later for later in range(layer + 1, len(has_experts)) if has_experts[later]), None)
        if following is not None:
            ahead = make("read_ahead", following, lane=DISK, after=[load], priority=PREFETCH)
            yield ahead
        kept = make("experts_kept", layer, after=[route])
        last = make("experts_that_arrived", layer, after=[kept, load])
        yield from (kept, last)
