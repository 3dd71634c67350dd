"""Layouts of the sliced experts paper as published, and the product's layer with slices.

- sliced-per-expert: algorithm 1, line by line. Ranks gather counts, and rows in the order of their expert. Each
  expert's slice is a product of its own over the rows of all ranks. A reduce-scatter adds the partial outputs.
- sliced-exact: moeflow's own layer with slices (`--attention-layout data --expert-layout sliced`), which cuts no sum.
- deepspeed: expert parallelism with a capacity. A product with a one-hot matrix [E * C, T] places rows, and another
  one takes them back, as `einsum("sec,sm->ecm")` does in DeepSpeed. Padded rows travel twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moeflow.kernels.cpu.expert_slices import PackedExpertSlices, SliceShape
from moeflow.kernels.cpu.packed_experts import ExpertKind, PackedExperts
from moeflow.models.layers.ranks.own_tokens import TokenRounds
from moeflow.models.layers.ranks.sliced_experts import SlicedExperts as ProductSlices
from moeflow.parallel.blocks import band_blocks
from moeflow.parallel.columns import Columns
from studies.parallel.case import LayerShape, Tokens
from studies.parallel.meter import Meter
from studies.parallel.padded_experts import Cells, PaddedExperts
from studies.parallel.result import Result
from studies.parallel.shared_weights import SharedWeights

PER_EXPERT = "sliced-per-expert"
EXACT = "sliced-exact"
DEEPSPEED = "deepspeed"
GROUPED = "sliced"  # the paper's other variant, in `layouts.py`


class PerExpertSlices:
    """A slice of every expert, each a product of its own."""

    def __init__(self, own: Sequence[PackedExperts]) -> None:
        """Take the slices one by one."""
        self._own = list(own)

    def run(self, tokens: Tokens, meter: Meter) -> Result:
        """See `RankLayout`."""
        top_k = tokens.topk_ids.shape[1]
        with meter.section("permute"):
            experts = tokens.topk_ids.view(-1)
            order = experts.argsort(stable=True)
            rows = tokens.x[order // top_k]
            counts = torch.bincount(experts, minlength=len(self._own))
        with meter.section("counts"):
            of_ranks = [part.tolist() for part in meter.all_gather("counts", counts)]
        with meter.section("tokens"):
            gathered = meter.all_gather("tokens", rows)
        with meter.section("experts"):
            partial = self._outputs(gathered, of_ranks)
        with meter.section("sums"):  # a reduce-scatter
            sums = _added(meter.all_to_all("partial outputs", partial))
        with meter.section("unpermute"):
            pairs = torch.empty_like(sums)
            pairs[order] = sums
            return Result((pairs.view(-1, top_k, sums.shape[1]) * tokens.topk_weights.unsqueeze(2)).sum(dim=1))

    def _outputs(self, gathered: Sequence[Tensor], of_ranks: Sequence[list[int]]) -> list[Tensor]:
        """Return this rank's partial outputs of each rank's rows, in the order of the rows."""
        inputs = [torch.split(part, counts) for part, counts in zip(gathered, of_ranks, strict=True)]
        outputs = [torch.empty_like(part) for part in gathered]
        places = [torch.split(part, counts) for part, counts in zip(outputs, of_ranks, strict=True)]
        for expert, own in enumerate(self._own):
            x = torch.cat([of_rank[expert] for of_rank in inputs])
            if len(x):
                found = own.compute(x, torch.zeros(len(x), 1, dtype=torch.int64), torch.ones(len(x), 1))
                parts = torch.split(found, [counts[expert] for counts in of_ranks])
                for place, part in zip(places, parts, strict=True):
                    place[expert].copy_(part)
        return outputs


class ExactSlices:
    """The product's slices, over whole experts in memory."""

    def __init__(self, layer: LayerShape, shared: SharedWeights, rank: int) -> None:
        self._layer = layer
        self._units, self._outputs = (band_blocks(size, layer.num_ranks) for size in (layer.width, layer.hidden))
        kind = ExpertKind(layer.function, layer.is_gated)
        shape = SliceShape(
            hidden=layer.hidden,
            width=layer.width,
            units=self._units[rank],
            outputs=self._outputs[rank],
            up_format=layer.weights,
            down_format=layer.weights,
            num_ups=kind.num_ups,
        )
        rows = shared.whole_rows()
        self._own = PackedExpertSlices(shape, rows, kind=kind, biases=None, is_wide=False, is_whole=True)

    def run(self, tokens: Tokens, meter: Meter) -> Result:
        """See `RankLayout`. All is one section, since the product exchanges units between products."""
        units, outputs = Columns(meter.group, "units", self._units), Columns(meter.group, "outputs", self._outputs)
        rounds = TokenRounds(meter.group, self._layer.hidden, self._layer.top_k)
        experts = rounds.add_layer(ProductSlices(self._own, units, outputs))
        with meter.section("experts"):
            return Result(experts.exchange(tokens.x, tokens.topk_ids, tokens.topk_weights))


class OneHotExperts(PaddedExperts):
    """Padded whole experts, as in DeepSpeed."""

    def _placed(self, tokens: Tokens, cells: Cells) -> Tensor:
        return self._one_hot(tokens, cells, torch.ones(len(cells.pairs))).T @ tokens.x

    def _taken(self, back: Tensor, tokens: Tokens, cells: Cells) -> Tensor:
        return self._one_hot(tokens, cells, tokens.topk_weights.view(-1)[cells.pairs]) @ back

    def _one_hot(self, tokens: Tokens, cells: Cells, values: Tensor) -> Tensor:
        """Return the matrix from cells to tokens, [T, E * C]."""
        mask = torch.zeros(len(tokens.x), cells.number)
        mask[cells.pairs // tokens.topk_ids.shape[1], cells.places] = values
        return mask


def _added(parts: Sequence[Tensor]) -> Tensor:
    first, *others = parts
    sums = first.clone()
    for part in others:
        sums += part
    return sums
