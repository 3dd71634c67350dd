"""Expert parallelism of several batches in flight as streams of tasks: with a barrier after each section, or without.

Each batch has a home device, which runs attention and routers; its tokens go to the devices that have their experts,
and come back as results. Source: ExpertFlow 3.2, figures 3.2 and 3.3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from moeflow.pipeline.task import Task, TaskMaker

ATTEND: Final = "attention"  # and the router
DISPATCH: Final = "dispatch"
EXPERTS: Final = "experts"
COMBINE: Final = "combine"
BARRIER: Final = "barrier"  # takes no time


@dataclass(frozen=True, slots=True)
class Batches:
    """Batches in flight on devices."""

    num_layers: int
    num_devices: int
    homes: Sequence[int]  # the device of each batch
    reached: Callable[[int, int], Sequence[int]]  # (layer, batch) -> devices that have some of its tokens' experts


def device_lane(device: int) -> str:
    """Return the name of the lane on which a device computes."""
    return f"device {device}"


def link_lane(device: int) -> str:
    """Return the name of the lane on which a device sends."""
    return f"link of device {device}"


def asynchronous(at: Batches) -> Iterator[Task]:
    """Yield a pass of all batches: each task begins when its own inputs are there and its device is free."""
    make = TaskMaker()
    results: list[list[Task]] = [[] for _ in at.homes]  # of the layer before, of each batch
    for layer in range(at.num_layers):
        for batch, home in enumerate(at.homes):
            attended = make(ATTEND, layer, batch, lane=device_lane(home), after=results[batch])
            yield attended
            sent = make(DISPATCH, layer, batch, lane=link_lane(home), after=[attended])
            yield sent
            results[batch] = []
            for device in at.reached(layer, batch):
                is_home = device == home
                done = make(EXPERTS, layer, batch, lane=device_lane(device), after=[attended if is_home else sent])
                yield done
                if not is_home:
                    done = make(COMBINE, layer, batch, lane=link_lane(device), after=[done])
                    yield done
                results[batch].append(done)


def synchronous(at: Batches) -> Iterator[Task]:
    """Yield the same with collectives: one batch a device at a time, and all devices wait for all after each section.

    Experts of a section are one task a device, for the tokens of all batches together: its `micro_batch` is the round.
    """
    make = TaskMaker()
    barrier: Task | None = None
    for layer in range(at.num_layers):
        for number, batches in enumerate(rounds(at)):
            homes = [at.homes[batch] for batch in batches]
            reached = sorted({device for batch in batches for device in at.reached(layer, batch)})
            for op, lanes in (
                (ATTEND, [(batch, device_lane(home)) for batch, home in zip(batches, homes, strict=True)]),
                (DISPATCH, [(batch, link_lane(home)) for batch, home in zip(batches, homes, strict=True)]),
                (EXPERTS, [(number, device_lane(device)) for device in reached]),
                (COMBINE, [(number, link_lane(device)) for device in reached]),
            ):
                section = [make(op, layer, batch, lane=lane, after=[barrier]) for batch, lane in lanes]
                yield from section
                barrier = make(BARRIER, layer, number, lane=BARRIER, after=section)
                yield barrier


def rounds(at: Batches) -> list[tuple[int, ...]]:
    """Return which batches run at the same time where devices wait for each other: one on each device."""
    of_devices: list[list[int]] = [[] for _ in range(at.num_devices)]
    for batch, home in enumerate(at.homes):
        of_devices[home].append(batch)
    number = max(map(len, of_devices))
    return [tuple(batches[turn] for batches in of_devices if turn < len(batches)) for turn in range(number)]
