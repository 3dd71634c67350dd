"""Expert parallelism with a capacity: each expert gets the same number of rows from every rank, padding included.

Rows are moved by index; `published_layouts.py` has DeepSpeed's products with one-hot matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeflow.kernels.cpu.expert_slots import add_pairs
from moeflow.kernels.cpu.packed_experts import PackedExperts
from studies.parallel.case import Tokens
from studies.parallel.meter import Meter
from studies.parallel.result import Result


@dataclass(frozen=True, slots=True)
class Cells:
    """Which pairs (token, k) have a place among their expert's C rows, the first that come, and where."""

    pairs: Tensor  # [N] int64
    places: Tensor  # [N] int64, of E * C
    number: int  # E * C

    @classmethod
    def of(cls, experts: Tensor, counts: Tensor, capacity: int) -> Cells:
        """Place the pairs, whose experts these are, [T * K]."""
        order = experts.argsort(stable=True)
        of_pair = experts[order]
        place = torch.arange(len(order)) - (counts.cumsum(0) - counts)[of_pair]
        is_kept = place < capacity
        return cls(order[is_kept], (of_pair * capacity + place)[is_kept], len(counts) * capacity)


class PaddedExperts:
    """Whole experts of this rank; each gets the same number of rows from every rank."""

    def __init__(self, own: Sequence[PackedExperts], num_held: Sequence[int], capacity: int | None) -> None:
        """Take experts one by one, how many each rank has, and C; None: the largest load."""
        self._own, self._num_held, self._capacity = own, list(num_held), capacity

    def run(self, tokens: Tokens, meter: Meter) -> Result:
        """See `RankLayout`."""
        hidden = tokens.x.shape[1]
        with meter.section("dispatch"):
            experts = tokens.topk_ids.view(-1)
            counts = torch.bincount(experts, minlength=sum(self._num_held))
            capacity = self._capacity
            if capacity is None:
                capacity = int(torch.cat(meter.all_gather("largest load", counts.max().view(1))).max())
            cells = Cells.of(experts, counts, capacity)
            parts = torch.split(self._placed(tokens, cells).view(-1, capacity, hidden), self._num_held)
            x = torch.stack(meter.all_to_all("padded rows", parts), dim=1)  # [E of this rank, P, C, H]
        with meter.section("experts"):
            results = torch.empty_like(x)
            topk_ids = torch.zeros(meter.size * capacity, 1, dtype=torch.int64)
            ones = torch.ones(topk_ids.shape)
            for expert, own in enumerate(self._own):
                results[expert] = own.compute(x[expert].view(-1, hidden), topk_ids, ones).view(x.shape[1:])
        with meter.section("combine"):
            back = torch.cat(meter.all_to_all("padded results", [part.contiguous() for part in results.unbind(1)]))
            sums = self._taken(back.view(-1, hidden), tokens, cells)
        is_kept = torch.zeros(len(experts), dtype=torch.bool).index_fill_(0, cells.pairs, True)
        return Result(sums, is_kept.view_as(tokens.topk_ids))

    def _placed(self, tokens: Tokens, cells: Cells) -> Tensor:
        """Return the rows in their cells, 0 in others. Shapes: -> [E * C, H]."""
        padded = torch.zeros(cells.number, tokens.x.shape[1])
        padded[cells.places] = tokens.x[cells.pairs // tokens.topk_ids.shape[1]]
        return padded

    def _taken(self, back: Tensor, tokens: Tokens, cells: Cells) -> Tensor:
        """Return the weighted sums of tokens from the cells' results. Shapes: back [E * C, H] -> [T, H]."""
        home = torch.zeros(tokens.topk_ids.numel(), back.shape[1])
        home[cells.pairs] = back[cells.places] * tokens.topk_weights.view(-1, 1)[cells.pairs]
        return add_pairs(home, tokens.topk_ids)
