"""What a rank's kernels, copies and exchanges take by themselves: constants of the machine that predictions start from.

Measured before any layout is, in the processes that will be measured and while all of them are at work, as processor
time: routers' choices, experts of some numbers of rows, rows that are put in order, and exchanges of two sizes. None of
it is taken from a layout's sections.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import msgspec
import torch

from moeflow.core.hardware import KernelEfficiency, MemoryLevel
from moeflow.core.units import KIB, MIB
from moeflow.kernels.cpu.packed_experts import PackedExperts
from moeflow.kernels.routing import Routing
from moeflow.parallel.group import Group
from moeflow.planner.costs.model_costs import ModelCosts
from moeflow.planner.costs.roofline import processor_of
from moeflow.planner.hardware.call_times import usual_s
from studies.parallel.case import LayerShape
from studies.parallel.layer_cost import COPY_PASSES, RankRates
from studies.parallel.shared_weights import SharedWeights, slice_bounds

TRIES: Final = 7
ROWS: Final = (4, 16, 64, 256, 1024)  # of an expert
CALL_ROWS: Final = 1024  # of a call, for as many experts as these are
TOKENS: Final = 1024
SMALL_BYTES: Final = KIB  # that each rank gives each other one
LARGE_BYTES: Final = MIB

_usual_s = partial(usual_s, TRIES, clock=time.thread_time)


class Measured(msgspec.Struct, frozen=True):
    """What a rank measured; seconds of processor time."""

    choose_s: tuple[float, float]  # for TOKENS tokens among all experts, and among 2 of them
    copy_s: float  # of LARGE_BYTES
    exchange_s: tuple[float, float]  # of SMALL_BYTES and LARGE_BYTES
    whole_s: list[tuple[int, float]]  # (rows of an expert, seconds of an expert)
    slice_s: list[tuple[int, float]]


def measure_rates(layer: LayerShape, shared: SharedWeights, group: Group) -> Measured:
    """Return what this rank measures, while the others do the same. Raises: GroupError."""
    whole = shared.whole(list(range(layer.num_experts)))
    return Measured(
        choose_s=(_choose_s(layer, layer.num_experts), _choose_s(layer, max(layer.top_k, 2))),
        copy_s=_copy_s(layer),
        exchange_s=(_exchange_s(group, SMALL_BYTES), _exchange_s(group, LARGE_BYTES)),
        whole_s=[(rows, _expert_s(whole, layer, rows)) for rows in ROWS],
        slice_s=[(rows, _expert_s(shared.slices(group.rank), layer, rows)) for rows in ROWS],
    )


def usual(measured: Sequence[Measured]) -> Measured:
    """Return the median over the ranks of each figure."""

    def median(values: Callable[[Measured], float]) -> float:
        return statistics.median(map(values, measured))

    def of_experts(values: Callable[[Measured], list[tuple[int, float]]]) -> list[tuple[int, float]]:
        return [(rows, median(lambda it: dict(values(it))[rows])) for rows in ROWS]  # noqa: B023  # called at once

    return Measured(
        choose_s=(median(lambda it: it.choose_s[0]), median(lambda it: it.choose_s[1])),
        copy_s=median(lambda it: it.copy_s),
        exchange_s=(median(lambda it: it.exchange_s[0]), median(lambda it: it.exchange_s[1])),
        whole_s=of_experts(lambda it: it.whole_s),
        slice_s=of_experts(lambda it: it.slice_s),
    )


def rank_rates(layer: LayerShape, measured: Measured) -> RankRates:
    """Return the constants of what is not a product."""
    all_s, few_s = measured.choose_s
    num_few = max(layer.top_k, 2)
    logit_s = max(all_s - few_s, 0.0) / TOKENS / max(layer.num_experts - num_few, 1)
    small_s, large_s = measured.exchange_s
    moved = max(layer.num_ranks - 1, 1)  # parts that a rank gives, and gets
    return RankRates(
        choose_token_s=max(few_s / TOKENS - num_few * logit_s, 0.0),
        choose_logit_s=logit_s,
        copy_bytes_per_s=COPY_PASSES * LARGE_BYTES / measured.copy_s,
        exchange_s=small_s,
        exchange_bytes_per_s=2 * COPY_PASSES * moved * (LARGE_BYTES - SMALL_BYTES) / max(large_s - small_s, 1e-9),
        measured_rows=CALL_ROWS,
    )


def with_experts(level: MemoryLevel, layer: LayerShape, costs: ModelCosts, measured: Measured) -> MemoryLevel:
    """Return a rank's level with the efficiency of experts as they are here, and of slices."""
    processor = processor_of(level)
    first, second, *_ = slice_bounds(layer.width, layer.num_ranks)
    sliced = replace(costs, shape=costs.shape.with_fields(intermediate_size=second - first))
    found = [
        _efficiency(level, of_which, rows, seconds)
        for of_which, times in ((costs, measured.whole_s), (sliced, measured.slice_s))
        for rows, seconds in times
    ]
    others = tuple(it for it in processor.efficiencies if it.kernel != "experts")
    return replace(level, processor=replace(processor, efficiencies=(*others, *found)))


def _efficiency(level: MemoryLevel, costs: ModelCosts, rows: int, seconds: float) -> KernelEfficiency:
    work, dtype = costs.experts(rows / costs.shape.routing.top_k, 1), costs.formats.matrices
    roof_s = max(work.num_bytes / level.read_bytes_per_s, work.num_flops / processor_of(level).peak(dtype))
    return KernelEfficiency(kernel="experts", dtype=dtype, rows=rows, share=roof_s / seconds, values=work.values)


def _expert_s(experts: PackedExperts, layer: LayerShape, rows: int) -> float:
    """Return the seconds of one expert of so many rows, of as many as there are in a call."""
    number = max(min(layer.num_experts, CALL_ROWS // rows), 1)
    x = torch.rand(number * rows, layer.hidden)
    topk_ids = (torch.arange(number * rows) % number).view(-1, 1)
    return _usual_s(lambda: experts.compute(x, topk_ids, torch.ones(len(x), 1))) / number


def _choose_s(layer: LayerShape, num_experts: int) -> float:
    logits = torch.rand(TOKENS, num_experts)
    choose = Routing(layer.top_k, renormalize=True)
    return _usual_s(lambda: choose(logits))


def _copy_s(layer: LayerShape) -> float:
    rows = torch.rand(LARGE_BYTES // (4 * layer.hidden) or 1, layer.hidden)
    order = torch.randperm(len(rows))
    return _usual_s(lambda: rows[order]) * LARGE_BYTES / rows.nbytes


def _exchange_s(group: Group, num_bytes: int) -> float:
    parts = [torch.zeros(num_bytes // 4) for _ in range(group.size)]

    def exchange() -> None:
        group.all_to_all("parts", parts)

    return _usual_s(exchange, lambda: group.barrier("exchange"))
