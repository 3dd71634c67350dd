"""The ops of a device that shares each layer with others: its parts of sums, and the all-reduces that add them up.

They take the place of `post_attention` (`pipeline/tensor_parallel.py`). Source: MoE-Lightning 4.3.
"""

from __future__ import annotations

from typing import Any

from moeflow.core.errors import ConfigError
from moeflow.engine.offload.divided_expert_ops import DividedExpertOps
from moeflow.engine.offload.micro_batches import MicroBatch
from moeflow.engine.offload.offload_ops import MicroBatchOp
from moeflow.parallel.group import Sums
from moeflow.pipeline.runtime.executor import Cost


class SharedLayerOps(DividedExpertOps):
    """Those of other pipelines, and the five steps."""

    def __init__(self, sums: Sums, num_devices: int, *given: Any) -> None:
        """Take what adds up the parts of so many devices; `given` as for `OffloadOps`.

        Raises: ConfigError for attention that needs the other devices before the output projection.
        """
        super().__init__(*given)
        if not all(attention.is_normed_here for attention in self._attentions):
            raise ConfigError(
                f"{num_devices} ranks (--ranks) cannot share this model ({self._model.config.model_type}) on devices "
                "that are smaller than it: its norms run over the queries of all heads. Use one rank"
            )
        self._sums, self._num_devices = sums, num_devices

    def _of_micro_batches(self) -> dict[str, MicroBatchOp]:
        return super()._of_micro_batches() | {
            "project_part": self._project_part,
            "sum_attention": self._sum,
            "network_part": self._network_part,
            "sum_network": self._sum,
            "add_network": self._add_network,
        }

    def _project_part(self, layer: int, micro_batch: MicroBatch) -> Cost:
        with self._computing("project_part", layer, micro_batch) as cost:
            tensors = micro_batch.tensors
            tensors["part"] = self._model.layers[layer].part_of_attention(tensors.pop("attended"))
        return cost

    def _sum(self, layer: int, micro_batch: MicroBatch) -> Cost:
        part = micro_batch.tensors["part"]
        num_bytes = part.nbytes - part.nbytes // self._num_devices  # of the others
        with self._device.exchanging(num_bytes):
            name = f"layer {layer}, micro-batch {micro_batch.number}"
            micro_batch.tensors["part"] = self._sums.all_reduce(name, part)
        return Cost(num_bytes)

    def _network_part(self, layer: int, micro_batch: MicroBatch) -> Cost:
        with self._computing("network_part", layer, micro_batch) as cost:
            tensors, on_device = micro_batch.tensors, self._on_device(layer)
            hidden = on_device.add_attention(tensors["hidden"], tensors.pop("part"))
            tensors["hidden"], tensors["part"] = on_device.part_of_network(hidden)
            self._use_up(layer)
        return cost

    def _add_network(self, layer: int, micro_batch: MicroBatch) -> Cost:
        with self._computing("add_network", layer, micro_batch) as cost:
            tensors = micro_batch.tensors
            tensors["hidden"] = self._model.layers[layer].add_network_sum(tensors["hidden"], tensors.pop("part"))
            self._norm_last(layer, micro_batch)
        return cost
