"""The ops of passes where the host computes some of each layer's experts: the ones with the smallest numbers.

A layer without a router is the device's alone. Source: as for `offload_ops.py`.
"""

from __future__ import annotations

from functools import partial

import torch

from moeflow.engine.offload.micro_batches import MicroBatch
from moeflow.engine.offload.offload_ops import MicroBatchOp, OffloadOps, total
from moeflow.models.layers.divided_experts import RoutedTokens, experts_below, experts_from
from moeflow.pipeline.runtime.executor import Cost
from moeflow.planner.costs.model_costs import expected_distinct


class DividedExpertOps(OffloadOps):
    """Those of `OffloadOps`, and what takes the place of `post_attention`."""

    def _of_micro_batches(self) -> dict[str, MicroBatchOp]:
        return super()._of_micro_batches() | {
            "route": self._route,
            "offload_routed": self._offload_routed,
            "host_experts": self._host_experts,
            "load_sums": self._load_sums,
            "experts": self._experts,
        }

    def _route(self, layer: int, micro_batch: MicroBatch) -> Cost:
        if not self._model.layers[layer].has_router:
            return Cost()
        tensors = micro_batch.tensors
        with self._computing("route", layer, micro_batch) as cost:
            routing = self._model.layers[layer].route(tensors["hidden"], tensors["attended"])
            tensors["hidden"], micro_batch.routed = routing
        return cost

    def _offload_routed(self, layer: int, micro_batch: MicroBatch) -> Cost:
        if not self._model.layers[layer].has_router:
            return Cost()
        assert micro_batch.routed is not None
        on_host = RoutedTokens(*(self._device.to_host(part) for part in micro_batch.routed))
        micro_batch.tensors |= {f"host_{name}": part for name, part in on_host._asdict().items()}
        return Cost(sum(part.nbytes for part in on_host))

    def _host_experts(self, layer: int, micro_batch: MicroBatch) -> Cost:
        """Compute for those tokens only that chose one of the host's experts."""
        if not self._model.layers[layer].has_router:
            return Cost()
        tensors, border = micro_batch.tensors, self._share.borders[layer]
        routed = RoutedTokens(*(tensors.pop(f"host_{name}") for name in RoutedTokens._fields))
        with self._device.computing_on_host(0, 0):
            is_hosted = routed.topk_ids < border
            rows = is_hosted.any(dim=1).nonzero().flatten()
            micro_batch.num_hosted_pairs = int(is_hosted.sum())
            num_distinct = int(torch.bincount(routed.topk_ids[is_hosted]).count_nonzero())
        cost = self._experts_cost(micro_batch.num_hosted_pairs, num_distinct)
        experts = self._model.layers[layer].movable_experts
        assert experts is not None
        with self._share.computing(layer, micro_batch.num_tokens), self._device.computing_on_host(*cost):
            tensors["host_rows"], tensors["host_sums"] = rows, experts_below(border, experts, routed.rows(rows))
        return cost

    def _load_sums(self, layer: int, micro_batch: MicroBatch) -> Cost:
        """Copy to the device. As with attention results, the copies for the previous layer are no longer in use."""
        if not self._model.layers[layer].has_router:
            return Cost()
        tensors, num_bytes = micro_batch.tensors, 0
        for name in ("rows", "sums"):
            on_host = tensors.pop(f"host_{name}")
            tensors[name] = self._device.to_device(on_host)
            num_bytes += on_host.nbytes
        return Cost(num_bytes)

    def _experts(self, layer: int, micro_batch: MicroBatch) -> Cost:
        if not self._model.layers[layer].has_router:
            return self._post_attention(layer, micro_batch)
        assert micro_batch.routed is not None
        tensors, shape, border = micro_batch.tensors, self._costs.shape, self._share.borders[layer]
        used = expected_distinct(shape.routing.num_experts, shape.routing.top_k, micro_batch.num_tokens)
        num_pairs = micro_batch.num_tokens * shape.routing.top_k - micro_batch.num_hosted_pairs
        cost = self._experts_cost(num_pairs, used * (1 - border / shape.routing.num_experts))
        with self._device.computing(*cost):
            experts = self._on_device(layer).movable_experts
            assert experts is not None
            below = (tensors["rows"], tensors["sums"])
            sums = partial(experts_from, border, experts, micro_batch.routed, below)
            tensors["hidden"] = self._model.layers[layer].add_divided(sums, tensors["hidden"])
            self._end_layer(layer, micro_batch)
        return cost

    def _experts_cost(self, num_pairs: int, num_distinct: float) -> Cost:
        return total([self._costs.experts(num_pairs / self._costs.shape.routing.top_k, num_distinct)])
