"""Seconds of layers that the ranks of an engine share, on the rank with most work.

Ranks run the same pass on the same numbers (docs/internals/ranks.md), so each knows all tokens. With whole experts, a
rank computes the pairs (token, expert) of its own experts. With slices, it computes a part of all pairs. Ranks exchange
pairs or units, and concatenate outputs. Each exchange waits for all ranks, so the one with most pairs decides.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import ceil
from typing import Final

import msgspec
import numpy as np

from moeflow.core.hardware import RANK, REMOTE_RANK, Link, LinkRate, Machine, MemoryLevel
from moeflow.core.parallel_config import GATHERED_BYTES, SLICED, WHOLE, ParallelConfig
from moeflow.core.units import MIB
from moeflow.kernels.on_demand import on_demand
from moeflow.planner.costs.expected_routing import ExpectedRouting
from moeflow.planner.costs.model_costs import KernelWork, ModelCosts, expected_distinct
from moeflow.planner.costs.rank_shares import RankShares
from moeflow.planner.costs.roofline import divided, processor_of, work_seconds

with on_demand(__name__):
    from moeflow.parallel.placement import whole_experts
    from moeflow.planner.costs import expected_experts

COPY_PASSES: Final = 2  # through memory of a reordered byte: read, written
_SMALL, _LARGE = 256, 2 * MIB
ASSUMED_LINKS: Final = {  # where none is measured or described: seconds of a small exchange, bytes a second of a large
    RANK: (2e-5, 5e9),
    REMOTE_RANK: (2e-4, 1e9),
}


_NO_WAITS: Final = Link(source=RANK, target=REMOTE_RANK, rates=(LinkRate(transfer_bytes=1, bytes_per_s=1e30),))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """The processes that compute on a machine: engines side by side, and the ranks of each."""

    parallel: ParallelConfig | None = None  # None: an engine is one process
    num_replicas: int = 1

    @property
    def num_here(self) -> int:
        """Ranks of an engine on this machine: all, unless they are spread over machines."""
        return 1 if self.parallel is None or self.parallel.is_spread else self.parallel.num_ranks

    def level(self, level: MemoryLevel) -> MemoryLevel:
        """Return a process's part of a level while all others work."""
        return divided(level, self.num_here * self.num_replicas)

    def weight_bytes(self, costs: ModelCosts) -> float:
        """Return an engine's bytes of weights here; with spread ranks, the most of any rank."""
        if self.parallel is None:
            return costs.model_bytes
        of_ranks = [costs.bytes_of(shares) for shares in RankShares.of_all(costs.shape, self.parallel)]
        return sum(of_ranks) if self.num_here > 1 else max(of_ranks)

    def kv_copies(self, costs: ModelCosts) -> float:
        """Return an engine's copies of a token's keys and values here."""
        if self.parallel is None:
            return 1.0
        keys = [shares.keys for shares in RankShares.of_all(costs.shape, self.parallel)]
        return sum(keys) if self.num_here > 1 else max(keys)


ALONE: Final = Sharing()


def link_of(machine: Machine, parallel: ParallelConfig) -> Link:
    """Return the link between ranks: of this machine, or between machines; assumed if it was not measured."""
    target = REMOTE_RANK if parallel.is_spread else RANK
    return next((link for link in machine.links if (link.source, link.target) == (RANK, target)), assumed_link(target))


def assumed_link(target: str) -> Link:
    """Return the assumed link between ranks."""
    small_s, bytes_per_s = ASSUMED_LINKS[target]
    rates = (
        LinkRate(transfer_bytes=_SMALL, bytes_per_s=_SMALL / small_s),
        LinkRate(transfer_bytes=_LARGE, bytes_per_s=bytes_per_s),
    )
    return Link(source=RANK, target=target, rates=rates)


class RankedLayers(msgspec.Struct, frozen=True, dict=True):
    """All layers of a model on ranks that are alike."""

    machine: Machine
    level: MemoryLevel  # a rank's part of the machine's memory
    costs: ModelCosts
    parallel: ParallelConfig

    def seconds(self, num_tokens: float, attention: KernelWork, distinct: float) -> float:
        """Return the seconds of a pass through all layers.

        `attention` is one layer's with all heads. `distinct` is the number of used experts, relative to even routers.
        """
        costs, shares = self.costs, self._most
        of_queries = costs.shape.attended_size * costs.shape.hidden_size / costs.shape.attention_input_values
        qkv = of_queries * shares.queries + (1 - of_queries) * shares.keys
        stages_s = self._work_s(_part(costs.pre_attention(num_tokens), qkv))
        stages_s += self._work_s(_part(attention, shares.keys, shares.queries))
        stages_s += self._work_s(_part(costs.output_projection(num_tokens), shares.outputs))
        stages_s += self._work_s(costs.row_operations(num_tokens))
        if self.parallel.has_own_sequences:
            stages_s /= self.parallel.num_ranks
        stages_s += self._python_s + self._attention_exchanges_s(num_tokens)
        networks_s = costs.num_moe_layers and costs.num_moe_layers * self._experts_s(num_tokens, distinct)
        if costs.num_dense_layers:
            networks_s += costs.num_dense_layers * self._dense_s(num_tokens)
        return float(costs.shape.num_layers * stages_s + networks_s)

    def head_s(self, num_sampled: float) -> float:
        """Return the seconds of the output projection, and of gathering its columns."""
        head_s = self._work_s(_part(self.costs.head(num_sampled), self._most.head))
        if self._is_cut:
            head_s += self._gather_s(num_sampled * self.costs.shape.vocab_size * self.costs.formats.activation_bytes)
        return head_s

    def gain_of_halves(self, num_tokens: int) -> float:
        """Return how many times as fast a prompt's layers are if each half waits for ranks while the other computes."""
        without_waits = msgspec.structs.replace(self, machine=replace(self.machine, links=(_NO_WAITS,)))
        attention = self.costs.prefill_attention(1, num_tokens, num_tokens)
        half = num_tokens / 2, _part(attention, 0.5), 1.0
        work_s = without_waits.seconds(*half)
        waits_s = self.seconds(*half) - work_s
        return self.seconds(num_tokens, attention, 1.0) / (work_s + max(work_s, waits_s))

    @property
    def link(self) -> Link:
        """The link from a rank to another."""
        return link_of(self.machine, self.parallel)

    @property
    def _is_cut(self) -> bool:
        return self.parallel.attention_layout == "tensor"

    @cached_property
    def _most(self) -> RankShares:
        """The largest share of each part that any rank has."""
        shares = RankShares.of_all(self.costs.shape, self.parallel)
        names = ("queries", "keys", "outputs", "dense", "shared", "head", "experts")
        return RankShares(**{name: max(getattr(it, name) for it in shares) for name in names})

    @cached_property
    def _python_s(self) -> float:
        """Seconds of a layer without kernels and exchanges; the measured value includes small exchanges."""
        parallel = self.parallel
        measured_s = processor_of(self.level).rank_layer_s(
            SLICED if parallel.has_slices else WHOLE, parallel.attention_layout
        )
        number = (2 if parallel.has_slices else 1) + (2 if self._is_cut else 0)
        here = link_of(self.machine, replace(parallel, is_spread=False))
        return max(measured_s - number * here.seconds(_SMALL), 0.0)

    def _attention_exchanges_s(self, num_tokens: float) -> float:
        if not self._is_cut:
            return 0.0
        shape, size = self.costs.shape, num_tokens * self.costs.formats.activation_bytes
        return self._gather_s(size * shape.attended_size) + self._gather_s(size * shape.hidden_size)

    def _dense_s(self, num_tokens: float) -> float:
        return self._network_s(self.costs.dense(num_tokens), self._most.dense, self.costs.dense_width, num_tokens)

    def _network_s(self, work: KernelWork, share: float, width: int, num_tokens: float) -> float:
        """Return the seconds of a network that all tokens use, and of its exchanges."""
        seconds = self._work_s(_part(work, share))
        if self._is_cut:
            size = num_tokens * self.costs.formats.activation_bytes
            seconds += self._gather_s(size * width) + self._gather_s(size * self.costs.shape.hidden_size)
        return seconds

    def _experts_s(self, num_tokens: float, distinct: float) -> float:
        """Return the seconds of a layer's router and experts, and of their exchanges."""
        router_s = self._work_s(self.costs.router(num_tokens))
        if self.costs.shape.feed_forward.shared_intermediate_size:
            router_s += self._network_s(
                self.costs.shared(num_tokens),
                self._most.shared,
                self.costs.shape.feed_forward.shared_intermediate_size,
                num_tokens,
            )
        experts_s = self._sliced_experts_s if self.parallel.has_slices else self._whole_experts_s
        return router_s + experts_s(num_tokens, distinct)

    def _whole_experts_s(self, num_tokens: float, distinct: float) -> float:
        shape, number = self.costs.shape, self.parallel.num_ranks
        layer = self._layer(num_tokens, distinct, self.costs)
        experts = whole_experts.WholeExperts.of(self.parallel, number, 1, shape.routing.num_experts)
        placement = experts.at_first if experts.place is None else experts.place(layer.routing.chances[None])
        row_bytes = shape.hidden_size * self.costs.formats.activation_bytes
        pairs_bytes = num_tokens * shape.routing.top_k * row_bytes
        copied_bytes = pairs_bytes  # filled with zeros, which the kernel then replaces
        if pairs_bytes <= GATHERED_BYTES:
            exchange_s = self._exchange_s(pairs_bytes / number * (number - 1))
            copied_bytes += pairs_bytes
        else:
            exchange_s = self._exchange_s(pairs_bytes / number**2 * (number - 1))
            exchange_s += self._gather_s(num_tokens * row_bytes)
            copied_bytes += 2 * pairs_bytes / number
        return layer.placed_s(placement) + exchange_s + self._copy_s(copied_bytes)

    def _sliced_experts_s(self, num_tokens: float, distinct: float) -> float:
        shape, size = self.costs.shape, num_tokens * self.costs.formats.activation_bytes
        width = max(ceil(self._most.experts * shape.feed_forward.intermediate_size), 1)
        costs = replace(self.costs, shape=shape.with_fields(intermediate_size=width))
        seconds = self._layer(num_tokens, distinct, costs).all_s()
        return (
            seconds
            + self._gather_s(size * shape.routing.top_k * shape.feed_forward.intermediate_size)
            + self._gather_s(size * shape.hidden_size)
        )

    def _layer(self, num_tokens: float, distinct: float, costs: ModelCosts) -> expected_experts.ExpectedExperts:
        shape = costs.shape
        return expected_experts.ExpectedExperts(
            level=self.level,
            costs=costs,
            num_ranks=self.parallel.num_ranks,
            num_tokens=max(round(num_tokens), 1),
            routing=routing_that_reaches(
                shape.routing.num_experts, shape.routing.top_k, max(round(num_tokens), 1), round(distinct, 3)
            ),
        )

    def _gather_s(self, num_bytes: float) -> float:
        """Return the seconds of gathering so many bytes, to which each rank contributes its part."""
        number = self.parallel.num_ranks
        return self._exchange_s(num_bytes / number * (number - 1)) + self._copy_s(num_bytes)

    def _exchange_s(self, received_bytes: float) -> float:
        """Return the seconds of an exchange that brings each rank so many bytes."""
        return self.link.seconds(max(received_bytes, _SMALL))

    def _copy_s(self, num_bytes: float) -> float:
        return COPY_PASSES * num_bytes / self.level.read_bytes_per_s

    def _work_s(self, work: KernelWork) -> float:
        return work_seconds(self.level, work)


def _part(work: KernelWork, share: float, of_flops: float | None = None) -> KernelWork:
    """Return a share of some work; `of_flops` is a different share of its operations."""
    flops = work.num_flops * (share if of_flops is None else of_flops)
    return replace(work, num_bytes=work.num_bytes * share, num_flops=flops, values=max(round(work.values * share), 1))


@lru_cache(maxsize=1024)
def routing_that_reaches(num_experts: int, top_k: int, num_tokens: int, distinct: float) -> ExpectedRouting:
    """Return routers under which so many tokens reach `distinct` times the experts of even routers.

    Assumed: an expert's load falls with a power of its rank by load, and tokens choose independently. (Consecutive
    tokens may choose alike instead, which leaves ranks more even.)
    """
    wanted = distinct * expected_distinct(num_experts, top_k, num_tokens)
    ranks = np.arange(1, num_experts + 1, dtype=float)
    low, high = 0.0, 8.0
    if distinct >= 1:
        high = 0.0
    for _ in range(20 if high else 0):
        middle = (low + high) / 2
        routing = ExpectedRouting.of_loads(ranks**-middle, top_k)
        reached = float((1 - (1 - routing.chances) ** num_tokens).sum())
        low, high = (middle, high) if reached > wanted else (low, middle)
    return ExpectedRouting.of_loads(ranks**-low, top_k)
