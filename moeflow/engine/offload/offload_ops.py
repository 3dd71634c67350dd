"""The ops of offloading pipelines on a real model: each does for one layer and one micro-batch what its name describes.

The device computes projections and experts; attention runs on the host, over keys and values that stay there, or on the
device. The pipeline defines the order of ops. Using a result before it exists raises.
Source: MoE-Lightning 4.1, algorithm 1 and figure 6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from moeflow.core.hardware import DEVICE
from moeflow.engine.offload.host_split import HostExpertSplit
from moeflow.engine.offload.micro_batches import MicroBatch, loads_kv
from moeflow.models.layers.attention import Attention
from moeflow.models.layers.decoder import CausalLM
from moeflow.models.layers.decoder_layer import DecoderLayer
from moeflow.pipeline.devices.offload_device import OffloadDevice
from moeflow.pipeline.devices.offloaded_kv import OffloadedKV
from moeflow.pipeline.devices.paged_weights import PagedWeights
from moeflow.pipeline.runtime.executor import Cost, Op
from moeflow.pipeline.task import Task
from moeflow.planner.costs.model_costs import KernelWork, ModelCosts
from moeflow.planner.costs.task_costs import WORKS, TaskShape

MicroBatchOp = Callable[[int, MicroBatch], Cost]


class OffloadOps:
    """The ops over one model's weights, keys and values; the micro-batches are those of the pass."""

    def __init__(
        self,
        model: CausalLM,
        halves: Sequence[Sequence[DecoderLayer]],
        weights: PagedWeights,
        kv: OffloadedKV,
        device: OffloadDevice,
        costs: ModelCosts,
        share: HostExpertSplit,
    ) -> None:
        """`halves[i]` are layer i with its experts in the one half of the weight buffer, and in the other."""
        self.micro_batches: Sequence[MicroBatch] = ()
        self._model = model
        self._attentions = [_per_head(layer) for layer in model.layers]
        self._on_host = [attention.on_host() for attention in self._attentions]
        self._halves = halves
        self._weights = weights
        self._kv = kv
        self._device = device
        self._costs = costs
        self._share = share
        self._num_ended = [0] * len(model.layers)  # micro-batches that are through with a layer
        self._loads_kv = False
        self._attention_works: Sequence[KernelWork] = ()  # of each micro-batch, in a layer

    def begin_pass(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Work on these from now on."""
        self.micro_batches = micro_batches
        self._num_ended = [0] * len(self._model.layers)
        self._loads_kv = loads_kv(micro_batches)
        self._attention_works = [self._costs.attention(it.num_tokens, it.num_seen, it.num_read) for it in micro_batches]

    def by_name(self) -> Mapping[str, Op]:
        """Return all ops."""
        return {
            "weights_to_pinned": self._ordered(self._weights_to_pinned),
            "weights_to_device": self._ordered(self._weights_to_device),
            "load_weights": self._ordered(self._load_weights),
            **{name: self._ordered(self._on_micro_batch(op)) for name, op in self._of_micro_batches().items()},
        }

    def _of_micro_batches(self) -> dict[str, MicroBatchOp]:
        return {
            "pre_attention": self._pre_attention,
            "offload_qkv": self._offload_qkv,
            "cpu_attention": self._cpu_attention,
            "load_hidden": self._load_hidden,
            "post_attention": self._post_attention,
            "kv_to_pinned": self._kv_to_pinned,
            "load_kv": self._load_kv,
            "device_attention": self._device_attention,
            "store_kv": self._store_kv,
            "save_kv": self._save_kv,
            "attention": self._attention,
        }

    # Weights:

    def _weights_to_pinned(self, task: Task) -> Cost:
        with self._device.computing_on_host(0, 0):
            return Cost(self._weights.stage(_layer(task), task.micro_batch))

    def _weights_to_device(self, task: Task) -> Cost:
        return Cost(self._weights.load(_layer(task), task.micro_batch))

    def _load_weights(self, task: Task) -> Cost:
        with self._device.computing_on_host(0, 0):
            self._weights.stage(_layer(task))
        return Cost(self._weights.load(_layer(task)))

    # On the device:

    def _pre_attention(self, layer: int, micro_batch: MicroBatch) -> Cost:
        with self._computing("pre_attention", layer, micro_batch) as cost:
            tensors = micro_batch.tensors
            if layer == 0:
                tensors["hidden"] = self._model.embed_at(micro_batch.token_ids, micro_batch.positions)
            tensors["qkv"] = self._model.layers[layer].pre_attention(tensors["hidden"])
            if micro_batch.attends_on_device and not self._kv.is_resident(layer):
                heads = self._attentions[layer].heads
                kv = tensors["qkv"][:, heads.num_heads * heads.head_dim :]
                micro_batch.new_kv[layer] = kv.clone()  # attention uses it up
        return cost

    def _post_attention(self, layer: int, micro_batch: MicroBatch) -> Cost:
        with self._computing("post_attention", layer, micro_batch) as cost:
            tensors = micro_batch.tensors
            tensors["hidden"] = self._on_device(layer).post_attention(tensors["hidden"], tensors["attended"])
            self._end_layer(layer, micro_batch)
        return cost

    def _on_device(self, layer: int) -> DecoderLayer:
        """Return a layer whose streamed weights are on the device. Raises: RuntimeError if they are not."""
        return self._halves[layer][self._weights.half_of(layer)]

    def _end_layer(self, layer: int, micro_batch: MicroBatch) -> None:
        self._norm_last(layer, micro_batch)
        self._use_up(layer)

    def _norm_last(self, layer: int, micro_batch: MicroBatch) -> None:
        """Normalise what the last layer returns."""
        if layer == len(self._halves) - 1:
            micro_batch.tensors["hidden"] = self._model.norm(micro_batch.tensors["hidden"])

    def _use_up(self, layer: int) -> None:
        """Note that a micro-batch needs no more weights; after the last one they may be overwritten."""
        self._num_ended[layer] += 1
        if self._num_ended[layer] == len(self.micro_batches):
            self._weights.release(layer)

    def _device_attention(self, layer: int, micro_batch: MicroBatch) -> Cost:
        if self._kv.is_resident(layer):
            blocks, places = self._kv.layer(layer), micro_batch.on_device
        else:
            number, places = micro_batch.number, micro_batch.in_window
            blocks = self._kv.window(layer, number) if self._loads_kv else self._kv.empty_window(layer)
        with self._computing("device_attention", layer, micro_batch) as cost:
            qkv = micro_batch.tensors.pop("qkv")
            attention = self._attentions[layer]
            micro_batch.tensors["attended"] = attention.attend_over(blocks, qkv, places.rotary, places.attention)
        return cost

    # On the host:

    def _cpu_attention(self, layer: int, micro_batch: MicroBatch) -> Cost:
        with self._device.computing_on_host(0, 0):
            pass  # waits for the inputs, which is no part of the host's time
        timing = self._share.attending(micro_batch.num_read)
        with timing, self._computing("cpu_attention", layer, micro_batch) as cost:
            qkv, places = micro_batch.tensors.pop("host_qkv"), micro_batch.on_host
            attended = self._on_host[layer].attend_over(
                self._kv.layer(layer), qkv.float(), places.rotary, places.attention
            )
            micro_batch.tensors["host_attended"] = attended.to(qkv.dtype)
        return cost

    # Between them:

    def _offload_qkv(self, layer: int, micro_batch: MicroBatch) -> Cost:
        qkv = micro_batch.tensors.pop("qkv")
        micro_batch.tensors["host_qkv"] = self._device.to_host(qkv)
        return Cost(qkv.nbytes)

    def _load_hidden(self, layer: int, micro_batch: MicroBatch) -> Cost:
        """Copy to the device. The copies for the previous layer have been used: QKV came of that."""
        attended = micro_batch.tensors.pop("host_attended")
        micro_batch.tensors["attended"] = self._device.to_device(attended)
        return Cost(attended.nbytes)

    def _kv_to_pinned(self, layer: int, micro_batch: MicroBatch) -> Cost:
        if self._kv.is_resident(layer) or not self._loads_kv:
            return Cost()
        with self._device.computing_on_host(0, 0):
            return Cost(self._kv.gather(layer, micro_batch.number, micro_batch.copied_blocks))

    def _load_kv(self, layer: int, micro_batch: MicroBatch) -> Cost:
        if self._kv.is_resident(layer) or not self._loads_kv:
            return Cost()
        return Cost(self._kv.load(layer, micro_batch.number, len(micro_batch.copied_blocks)))

    def _store_kv(self, layer: int, micro_batch: MicroBatch) -> Cost:
        """Copy new projected keys and values to the host."""
        if self._kv.is_resident(layer):
            return Cost()
        new = self._device.to_host(micro_batch.new_kv.pop(layer))
        micro_batch.new_kv_on_host[layer] = new
        return Cost(new.nbytes)

    def _save_kv(self, layer: int, micro_batch: MicroBatch) -> Cost:
        """Rotate and store what came to the host."""
        if self._kv.is_resident(layer):
            return Cost()
        new, places, attention = micro_batch.new_kv_on_host.pop(layer), micro_batch.on_host, self._on_host[layer]
        first = attention.heads.num_heads * attention.heads.head_dim
        with self._device.computing_on_host(0, 0):
            qkv = torch.zeros(len(new), first + new.shape[1])
            qkv[:, first:] = new
            attention.store(self._kv.layer(layer), qkv, places.rotary, places.attention)
        return Cost(new.nbytes)

    # For the plain twin:

    def _attention(self, layer: int, micro_batch: MicroBatch) -> Cost:
        if micro_batch.attends_on_device or self._kv.is_resident(layer):
            self._kv_to_pinned(layer, micro_batch)
            self._load_kv(layer, micro_batch)
            cost = self._device_attention(layer, micro_batch)
            self._store_kv(layer, micro_batch)
            self._save_kv(layer, micro_batch)
            return cost
        self._offload_qkv(layer, micro_batch)
        cost = self._cpu_attention(layer, micro_batch)
        self._load_hidden(layer, micro_batch)
        return cost

    @contextmanager
    def _computing(self, op: str, layer: int, micro_batch: MicroBatch) -> Iterator[Cost]:
        """Return a `with` block for what an op computes, which gives its cost."""
        attention = self._attention_works[micro_batch.number]
        shape = TaskShape(costs=self._costs, num_tokens=micro_batch.num_tokens, attention=attention, layer=layer)
        level, works = WORKS[op]
        cost = total(works(shape))
        with self._device.computing(*cost) if level == DEVICE else self._device.computing_on_host(*cost):
            yield cost

    def _on_micro_batch(self, op: MicroBatchOp) -> Op:
        def run(task: Task) -> Cost:
            assert task.micro_batch is not None
            with torch.inference_mode():  # which holds for a thread
                return op(_layer(task), self.micro_batches[task.micro_batch])

        return run

    def _ordered(self, op: Op) -> Op:
        def run(task: Task) -> Cost | None:
            with self._device.ordered(task.id, task.after):
                return op(task)

        return run


def _layer(task: Task) -> int:
    assert task.layer is not None
    return task.layer


def total(works: Sequence[KernelWork]) -> Cost:
    """Return the total cost of works."""
    return Cost(int(sum(work.num_bytes for work in works)), int(sum(work.num_flops for work in works)))


def _per_head(layer: DecoderLayer) -> Attention:
    assert isinstance(layer.self_attn, Attention), "latent attention is not run on devices"
    return layer.self_attn
