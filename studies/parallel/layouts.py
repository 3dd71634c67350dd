"""What a rank does in a layer, by how the experts lie on the ranks. Each has tokens of its own, and gets their sums.

- expert: whole experts in blocks. A row goes once to each rank that has some of its experts; the weighted results of
  pairs (token, expert) come back and are added up in ascending order of expert, so the bits are those of one process.
- expert-by-load: the same; experts are placed by an earlier batch's loads, with one slot more a rank for replicas.
- what other packages add: the same; experts are placed as they say.
- capacity, capacity-dropless: as DeepSpeed's expert parallelism. Each rank sends every expert C rows, padding included,
  and an expert computes all of them. What is beyond C = f K T / E is dropped; dropless, C is the largest load of any
  rank and expert. Rows are moved by index: DeepSpeed's products with one-hot matrices are left out.
- sliced: every rank has a slice of every expert (algorithm 1 of the study). Rows keep their order and carry their
  choices with them, where the study sorts rows by expert and gathers counts: our kernel sorts indices, and a token
  travels once however many experts it has. Partial sums are added by rank, so the last bits differ from one process's.

Both variants of the study, a product per expert and one launch for all experts, are the same here: a call of the kernel
runs through the experts one after the other on the calling thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moeflow.core.parallel_config import SLICED
from moeflow.kernels.cpu.expert_slots import SlotExperts, add_pairs
from moeflow.kernels.cpu.packed_experts import PackedExperts
from moeflow.parallel.placement.layouts import CAPACITY, CAPACITY_DROPLESS, place_experts
from moeflow.parallel.placement.placement import ExpertPlacement, ServingTable
from studies.parallel.case import Case, Tokens
from studies.parallel.layer_cost import padded_rows
from studies.parallel.meter import Meter
from studies.parallel.shared_weights import SharedWeights


@dataclass(frozen=True, slots=True)
class Result:
    """What a rank's tokens get."""

    sums: Tensor  # [T, H]
    is_kept: Tensor | None = None  # [T, K] bool: whether a choice was computed; None: all were


class RankLayout(Protocol):
    """A rank's part of a layer."""

    def run(self, tokens: Tokens, meter: Meter) -> Result:
        """Return the weighted sums of this rank's tokens. Blocks: until the others are through. Raises: GroupError."""


def make_layout(name: str, case: Case, shared: SharedWeights, rank: int) -> RankLayout:
    """Return a rank's part of a layout. Raises: ConfigError if it is another package's and cannot be used."""
    layer = case.layer
    if name == SLICED:
        return SlicedExperts(shared.slices(rank), case.num_tokens)
    if name in (CAPACITY, CAPACITY_DROPLESS):
        placement = ExpertPlacement.by_index(1, layer.num_experts, layer.num_ranks)
        held = [placement.held_by(each, 0) for each in range(layer.num_ranks)]
        capacity = None
        if name == CAPACITY:
            capacity = padded_rows(case.capacity_factor, layer.top_k, max(case.num_tokens), layer.num_experts)
        return PaddedExperts([shared.whole([expert]) for expert in held[rank]], [len(it) for it in held], capacity)
    placement = place_experts(name, case.loads_before()[None], layer.num_ranks)
    ranks = ServingTable(placement.homes[0]).ranks(case.topk_ids())
    own = torch.split(torch.from_numpy(ranks), list(case.num_tokens))[rank]
    held_here = placement.held_by(rank, 0)
    slots_of = {expert: slot for slot, expert in enumerate(held_here)}
    weights = shared.whole(held_here or [0])  # the kernel wants one, even one that is never used
    return WholeExperts(weights, slots_of, own, layer.num_experts)


class WholeExperts:
    """Whole experts of this rank, and where the choices of its tokens go."""

    def __init__(self, own: PackedExperts, slots: Mapping[int, int], ranks: Tensor, num_experts: int) -> None:
        """`ranks` [T, K] are those that serve this rank's tokens, looked up before the clock starts."""
        self._experts, self._ranks = SlotExperts(own, num_experts + 1, slots), ranks
        self._elsewhere = num_experts  # stands for an expert that another rank computes

    def run(self, tokens: Tokens, meter: Meter) -> Result:
        """See `RankLayout`."""
        hidden, top_k = tokens.x.shape[1], tokens.topk_ids.shape[1]
        with meter.section("dispatch"):
            rows = [(self._ranks == rank).any(dim=1).nonzero().view(-1) for rank in range(meter.size)]
            parts = meter.all_to_all("rows", [tokens.x[part] for part in rows])
            choices = meter.all_to_all("choices", [self._choices(tokens, part, rank) for rank, part in enumerate(rows)])
            x, (topk_ids, topk_weights) = torch.cat(parts), _split_choices(torch.cat(choices))
        with meter.section("experts"):
            pairs = torch.empty(len(x) * top_k, hidden)
            self._experts.pairs(x, topk_ids, topk_weights, pairs)
        with meter.section("combine"):
            is_here = torch.split(topk_ids.view(-1) != self._elsewhere, [len(part) * top_k for part in parts])
            computed = torch.split(pairs, [len(mask) for mask in is_here])
            back = meter.all_to_all("pairs", [part[mask] for part, mask in zip(computed, is_here, strict=True)])
            home = torch.empty(tokens.topk_ids.numel(), hidden)
            for rank, part in enumerate(back):
                home[(self._ranks == rank).view(-1)] = part
            return Result(add_pairs(home, tokens.topk_ids))

    def _choices(self, tokens: Tokens, rows: Tensor, rank: int) -> Tensor:
        """Return what a rank has to do with the rows it gets; experts that others compute are left out."""
        is_there = self._ranks[rows] == rank
        topk_ids = tokens.topk_ids[rows].masked_fill_(~is_there, self._elsewhere)
        return _join_choices(topk_ids, tokens.topk_weights[rows])


class PaddedExperts:
    """Whole experts of this rank; each gets the same number of rows from every rank."""

    def __init__(self, own: Sequence[PackedExperts], num_held: Sequence[int], capacity: int | None) -> None:
        """Take experts one by one, how many each rank has, and C; None: the largest load."""
        self._own, self._num_held, self._capacity = own, list(num_held), capacity

    def run(self, tokens: Tokens, meter: Meter) -> Result:
        """See `RankLayout`."""
        hidden, top_k = tokens.x.shape[1], tokens.topk_ids.shape[1]
        with meter.section("dispatch"):
            experts = tokens.topk_ids.view(-1)
            counts = torch.bincount(experts, minlength=sum(self._num_held))
            capacity = self._capacity
            if capacity is None:
                capacity = int(torch.cat(meter.all_gather("largest load", counts.max().view(1))).max())
            pairs, cells = _cells(experts, counts, capacity)
            padded = torch.zeros(len(counts) * capacity, hidden)
            padded[cells] = tokens.x[pairs // top_k]
            parts = torch.split(padded.view(-1, capacity, hidden), self._num_held)
            x = torch.stack(meter.all_to_all("padded rows", parts), dim=1)  # [E of this rank, P, C, H]
        with meter.section("experts"):
            results = torch.empty_like(x)
            topk_ids = torch.zeros(meter.size * capacity, 1, dtype=torch.int64)
            ones = torch.ones(topk_ids.shape)
            for expert, own in enumerate(self._own):
                results[expert] = own.compute(x[expert].view(-1, hidden), topk_ids, ones).view(x.shape[1:])
        with meter.section("combine"):
            back = torch.cat(meter.all_to_all("padded results", [part.contiguous() for part in results.unbind(1)]))
            home = torch.zeros(len(experts), hidden)
            home[pairs] = back.view(-1, hidden)[cells] * tokens.topk_weights.view(-1, 1)[pairs]
            sums = add_pairs(home, tokens.topk_ids)
        is_kept = torch.zeros(len(experts), dtype=torch.bool).index_fill_(0, pairs, True)
        return Result(sums, is_kept.view_as(tokens.topk_ids))


class SlicedExperts:
    """A slice of every expert."""

    def __init__(self, own: PackedExperts, num_tokens: Sequence[int]) -> None:
        """`num_tokens` are those of each rank."""
        self._own, self._num_tokens = own, list(num_tokens)

    def run(self, tokens: Tokens, meter: Meter) -> Result:
        """See `RankLayout`."""
        with meter.section("dispatch"):
            choices = meter.all_gather("choices", _join_choices(tokens.topk_ids, tokens.topk_weights))
            x = torch.cat(meter.all_gather("rows", tokens.x))
            topk_ids, topk_weights = _split_choices(torch.cat(choices))
        with meter.section("experts"):
            partial = self._own.compute(x, topk_ids, topk_weights)
        with meter.section("combine"):  # a reduce-scatter
            first, *others = meter.all_to_all("partial sums", torch.split(partial, self._num_tokens))
            sums = first.clone()
            for part in others:
                sums += part
            return Result(sums)


def _join_choices(topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
    """Return experts and weights as one tensor to send, [T, 2K] int32."""
    return torch.cat([topk_ids.int(), topk_weights.view(torch.int32)], dim=1)


def _split_choices(choices: Tensor) -> tuple[Tensor, Tensor]:
    """Return topk_ids and topk_weights, [T, K] each."""
    topk_ids, topk_weights = choices.chunk(2, dim=1)
    return topk_ids.long(), topk_weights.contiguous().view(torch.float32)


def _cells(experts: Tensor, counts: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Return which pairs have a place among their expert's C rows, the first that come, and where of E * C."""
    order = experts.argsort(stable=True)
    of_pair = experts[order]
    place = torch.arange(len(order)) - (counts.cumsum(0) - counts)[of_pair]
    is_kept = place < capacity
    return order[is_kept], (of_pair * capacity + place)[is_kept]
