"""From one placement of experts to another in small steps, while every expert stays reachable.

A step is done when its copy has landed; until then the old placement serves. Where that cannot be avoided (experts that
change places), a rank has one expert more than it will have in the end: its staging slot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from moeflow.parallel.placement.placement import ExpertPlacement


@dataclass(frozen=True, slots=True)
class ReplicaMove:
    """One replica that goes from a rank to another."""

    layer: int
    expert: int
    from_rank: int | None  # gives it up; None: a further replica, whose weights any home can send
    to_rank: int | None  # gets it; None: a replica too many is dropped


def moves(old: ExpertPlacement, new: ExpertPlacement, max_moves: int) -> list[ReplicaMove]:
    """Return the first steps that lead from `old` to `new`, layer by layer; [] if they are the same.

    After each, every expert has a home. A rank has at most as many experts of a layer as in `old`, or one more than in
    `new`.
    """
    steps = (step for layer in range(len(old.homes)) for step in _layer_moves(old, new, layer))
    return list(islice(steps, max_moves))


def apply_moves(placement: ExpertPlacement, steps: Sequence[ReplicaMove]) -> ExpertPlacement:
    """Return the placement that some steps lead to."""
    homes = [[set(ranks) for ranks in experts] for experts in placement.homes]
    for step in steps:
        homes[step.layer][step.expert] -= {step.from_rank}
        if step.to_rank is not None:
            homes[step.layer][step.expert].add(step.to_rank)
    tables = tuple(tuple(tuple(sorted(ranks)) for ranks in experts) for experts in homes)
    return ExpertPlacement(placement.num_ranks, tables)


def _layer_moves(old: ExpertPlacement, new: ExpertPlacement, layer: int) -> Iterator[ReplicaMove]:
    """Yield drops, then steps into free slots; only where all is full, one into the staging slot."""
    room = [0] * old.num_ranks
    waiting: list[ReplicaMove] = []
    for expert, (had, has) in enumerate(zip(old.homes[layer], new.homes[layer], strict=True)):
        leaving, arriving = [rank for rank in had if rank not in has], [rank for rank in has if rank not in had]
        for rank in leaving:
            room[rank] -= 1
        for rank in arriving:
            room[rank] += 1
        for number, to_rank in enumerate(arriving):
            waiting.append(ReplicaMove(layer, expert, leaving[number] if number < len(leaving) else None, to_rank))
        for from_rank in leaving[len(arriving) :]:
            room[from_rank] += 1
            yield ReplicaMove(layer, expert, from_rank, None)
    while waiting:
        number = next((i for i, step in enumerate(waiting) if step.to_rank is not None and room[step.to_rank] > 0), 0)
        step = waiting.pop(number)
        if step.from_rank is not None:
            room[step.from_rank] += 1
        if step.to_rank is not None:
            room[step.to_rank] -= 1
        yield step
