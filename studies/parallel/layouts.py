"""The work of a rank in a layer, for each layout of experts. Each rank has tokens of its own, and gets their sums.

- expert: Whole experts in blocks. A row goes once to each rank that has some of its experts. The weighted results of
  pairs (token, expert) come back. They are added in ascending order of expert, so the bits are those of one process.
- expert-by-load: The same exchange. An earlier batch's loads place the experts, and each rank has a slot for a replica.
- layouts of other packages: The same exchange, with their own placement.
- capacity, capacity-dropless: as DeepSpeed's expert parallelism. Each rank sends every expert C rows, padding included,
  and an expert computes all of them. Choices beyond C = f K T / E are dropped; dropless, C is the largest load of any
  rank and expert. Rows are moved by index (`padded_experts.py`).
- sliced: every rank has a slice of every expert, and one call of the kernel computes all (the grouped variant of the
  study). Rows keep their order and carry their choices: the kernel sorts indices, and a token
  travels once however many experts it has. Partial sums are added by rank, so the last bits differ from one process's.
- `published_layouts.py` has the study's own arms, which whole models are measured with.
"""

from __future__ import annotations

from collections.abc import Mapping
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
from studies.parallel.padded_experts import PaddedExperts
from studies.parallel.published_layouts import DEEPSPEED, EXACT, PER_EXPERT, ExactSlices, OneHotExperts, PerExpertSlices
from studies.parallel.result import Result
from studies.parallel.shared_weights import SharedWeights


class RankLayout(Protocol):
    """A rank's part of a layer."""

    def run(self, tokens: Tokens, meter: Meter) -> Result:
        """Return the weighted sums of this rank's tokens. Blocks: until the others are through. Raises: GroupError."""


def make_layout(name: str, case: Case, shared: SharedWeights, rank: int) -> RankLayout:
    """Return a rank's part of a layout. Raises: ConfigError if it is another package's and cannot be used."""
    layer = case.layer
    if name == SLICED:
        return SlicedExperts(shared.slices(rank))
    if name == PER_EXPERT:
        return PerExpertSlices([shared.slices(rank, [expert]) for expert in range(layer.num_experts)])
    if name == EXACT:
        return ExactSlices(layer, shared, rank)
    if name in (CAPACITY, CAPACITY_DROPLESS, DEEPSPEED):
        placement = ExpertPlacement.by_index(1, layer.num_experts, layer.num_ranks)
        held = [placement.held_by(each, 0) for each in range(layer.num_ranks)]
        capacity = None
        if name != CAPACITY_DROPLESS:
            capacity = padded_rows(case.capacity_factor, layer.top_k, max(case.num_tokens), layer.num_experts)
        kind = OneHotExperts if name == DEEPSPEED else PaddedExperts
        return kind([shared.whole([expert]) for expert in held[rank]], [len(it) for it in held], capacity)
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


class SlicedExperts:
    """A slice of every expert, in one call of the kernel."""

    def __init__(self, own: PackedExperts) -> None:
        self._own = own

    def run(self, tokens: Tokens, meter: Meter) -> Result:
        """See `RankLayout`."""
        with meter.section("dispatch"):
            choices = meter.all_gather("choices", _join_choices(tokens.topk_ids, tokens.topk_weights))
            rows = meter.all_gather("rows", tokens.x)
            x = torch.cat(rows)
            topk_ids, topk_weights = _split_choices(torch.cat(choices))
        with meter.section("experts"):
            partial = self._own.compute(x, topk_ids, topk_weights)
        with meter.section("combine"):  # a reduce-scatter
            first, *others = meter.all_to_all("partial sums", torch.split(partial, [len(part) for part in rows]))
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
