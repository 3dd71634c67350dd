"""A model that is larger than its device, in the place of a `CausalLM`: its passes go through a pipeline.

Experts are streamed, as far as they do not stay on the device; all other weights stay there. The results are those of
the model's plain forward pass, to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from moeflow.core.engine_config import EngineConfig
from moeflow.engine.micro_batches import cut_pass
from moeflow.engine.offload_ops import OffloadOps
from moeflow.engine.offload_plan import OFFLOADING, SEQUENTIAL, costs_of
from moeflow.kernels.cpu import PackedRows
from moeflow.layers.context import ForwardContext
from moeflow.layers.decoder import CausalLM
from moeflow.layers.decoder_layer import DecoderLayer
from moeflow.memory.emulated_device import EmulatedDevice
from moeflow.memory.offloaded_kv import KVShape, OffloadedKV
from moeflow.memory.paged_weights import PagedWeights
from moeflow.pipeline.offloading import DEVICE_TO_HOST, HOST, HOST_TO_DEVICE, HOST_TO_PINNED
from moeflow.runtime.executor import Executor
from moeflow.runtime.lane import Lane
from moeflow.runtime.trace import Trace

LANES: Final = (HOST, HOST_TO_DEVICE, DEVICE_TO_HOST, HOST_TO_PINNED)  # beside the one that computes


class OffloadedModel:
    """A loaded model, its device, and the threads that keep both busy."""

    def __init__(self, model: CausalLM, config: EngineConfig, trace: Trace | None = None) -> None:
        """Take a packed model in main memory. Raises: CapacityError if the device lacks room; ConfigError."""
        assert config.offload is not None
        self.config = model.config
        self._model = model
        self._config = config.offload
        self._pipeline = OFFLOADING[config.offload.pipeline]
        self.device = EmulatedDevice(config.offload.device)
        costs = costs_of(model.config, config.weight_format, config.embedding_format, config.kv_dtype)
        self.device.memory.take(_bytes_outside_experts(model), "weights outside of experts")
        self.device.memory.take(int(costs.activation_bytes(config.scheduler.max_batch_tokens)), "activations")
        self._kv = self._place_kv(config)
        expert_bytes, streamed = _split_experts(model, config.offload.num_resident_experts)
        self.device.memory.take(expert_bytes, "experts that stay")
        self._weights = PagedWeights(streamed, self.device)
        self._ops = OffloadOps(model, self._make_halves(), self._weights, self._kv, self.device, costs)
        self._costs = costs
        self._is_warm = False
        self._lanes = {name: Lane(name, trace=trace) for name in LANES}
        self._executor = Executor(self._ops.by_name(), self._lanes, trace=trace)

    def __call__(self, token_ids: Tensor, context: ForwardContext) -> Tensor:
        """Do as `CausalLM` does: return the hidden states after the final norm; writes K and V of every token.

        Shapes: token_ids [T] int64 -> [T, H]. Raises: what an op raises; the next pass begins anew.
        """
        max_tokens = self._config.micro_batch_tokens
        micro_batches = cut_pass(token_ids, context, self._model.rotary, self._model.dtype, max_tokens=max_tokens)
        self._weights.begin_pass(len(micro_batches) if self._pipeline.is_paged else 1)
        self._kv.begin_pass(context.kv)
        self._ops.begin_pass(micro_batches)
        was_warm, self._is_warm = self._is_warm, False
        wraps = self.config.num_layers > 1
        try:
            self._executor.run(
                self._pipeline.make_tasks(self.config.num_layers, len(micro_batches), is_warm=was_warm, wraps=wraps)
            )
        except BaseException:
            self._weights.forget()
            raise
        self._is_warm = wraps and self._pipeline is not SEQUENTIAL
        hidden = torch.empty(len(token_ids), self.config.hidden_size, dtype=self._model.dtype)
        for micro_batch in micro_batches:
            hidden[micro_batch.rows] = micro_batch.tensors["hidden"]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Shapes: hidden [S, H] from a pass -> [S, V] float32."""
        work = self._costs.head(len(hidden))
        with self.device.computing(int(work.num_bytes), int(work.num_flops)):
            return self._model.logits(hidden)

    def close(self) -> None:
        """End the threads."""
        for lane in self._lanes.values():
            lane.close()

    def _place_kv(self, config: EngineConfig) -> OffloadedKV:
        shape, limits = self._model.config, config.scheduler
        kv_shape = KVShape(
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=getattr(torch, config.kv_dtype),
        )
        return OffloadedKV(
            kv_shape,
            self.device,
            num_resident=self._config.num_resident_kv_layers,
            window_blocks=self._config.window_blocks,
        )

    def _make_halves(self) -> list[list[DecoderLayer]]:
        """Return each layer twice: with its streamed experts in either half of the device's buffer."""
        halves = []
        for number, layer in enumerate(self._model.layers):
            packed = layer.packed_experts
            if packed is None:
                halves.append([layer, layer])
                continue
            rows = list(packed.storage[: self._config.num_resident_experts])
            num_streamed = packed.num_experts - len(rows)
            halves.append(
                [
                    layer.with_experts(packed.at([*rows, *half.view(num_streamed, -1)])) if num_streamed else layer
                    for half in self._weights.halves(number)
                ]
            )
        return halves


def _split_experts(model: CausalLM, num_resident: int) -> tuple[int, list[Tensor]]:
    """Return the bytes of the experts that stay, and each layer's others: [bytes] uint8."""
    resident_bytes = 0
    streamed = []
    for layer in model.layers:
        packed = layer.packed_experts
        if packed is None:
            streamed.append(torch.empty(0, dtype=torch.uint8))
            continue
        assert isinstance(packed.storage, Tensor)  # as loaded: all rows in one piece
        resident_bytes += packed.storage[:num_resident].nbytes
        streamed.append(packed.storage[num_resident:].reshape(-1))
    return resident_bytes, streamed


def _bytes_outside_experts(model: CausalLM) -> int:
    """Return what all other weights take."""
    experts = {id(part.weight) for layer in model.layers for part in _expert_parts(layer)}
    sizes: dict[int, int] = {}
    for _, destination in model.named_weights():
        if isinstance(destination, Tensor):
            sizes[id(destination)] = destination.nbytes
        elif id(destination.weight) not in experts:
            sizes[id(destination.weight)] = destination.weight.nbytes
    return sum(sizes.values())


def _expert_parts(layer: DecoderLayer) -> Iterator[PackedRows]:
    packed = layer.packed_experts
    if packed is not None:
        for parts in packed.parts():
            yield from parts
