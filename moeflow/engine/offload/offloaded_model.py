"""A model that is larger than its device, in the place of a `CausalLM`: its passes go through a pipeline.

Experts are streamed, as far as they do not stay on the device; all other weights stay there. The device computes the
model's own layers: packed, with results bit-equal to its plain forward pass, or as torch tensors on any torch device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from moeflow.core.engine_config import EngineConfig
from moeflow.core.offload_config import OffloadConfig
from moeflow.engine.offload.divided_expert_ops import DividedExpertOps
from moeflow.engine.offload.expert_places import place_experts
from moeflow.engine.offload.host_split import HostExpertSplit
from moeflow.engine.offload.micro_batches import Cut, MicroBatch, Side, cut_pass, loads_kv
from moeflow.engine.offload.shared_layer_ops import SharedLayerOps
from moeflow.kernels.cpu.latent_weights import PackedUpProjection
from moeflow.kernels.cpu.packed_weight import PackedRows
from moeflow.kernels.triton.planar_rows import PlanarRows
from moeflow.models.layers.context import ForwardContext
from moeflow.models.layers.decoder import CausalLM
from moeflow.models.layers.decoder_layer import DecoderLayer
from moeflow.models.layers.expert_weights import Destination
from moeflow.models.layers.moe import MoE
from moeflow.models.layers.rearranged import Rearranged
from moeflow.models.layers.rotary import RotaryEmbeddings
from moeflow.parallel.blocks import shape_of_rank
from moeflow.pipeline.catalog import OFFLOADING, PROMPTS, SEQUENTIAL, Pipeline
from moeflow.pipeline.device_attention import attending_on_device
from moeflow.pipeline.devices.cuda_device import CudaDevice
from moeflow.pipeline.devices.emulated_device import EmulatedDevice
from moeflow.pipeline.devices.offloaded_kv import KVShape, OffloadedKV
from moeflow.pipeline.offloading import BETWEEN_DEVICES, DEVICE_TO_HOST, HOST, HOST_TO_DEVICE, HOST_TO_PINNED
from moeflow.pipeline.runtime.executor import Executor
from moeflow.pipeline.runtime.lane import Lane
from moeflow.pipeline.runtime.trace import Trace
from moeflow.pipeline.task import Task
from moeflow.pipeline.tensor_parallel import sharing_layers
from moeflow.planner.choices.offload_plan import activation_bytes, costs_of

if TYPE_CHECKING:
    from moeflow.parallel.device_group import DeviceGroup

LANES: Final = (HOST, HOST_TO_DEVICE, DEVICE_TO_HOST, HOST_TO_PINNED)  # in addition to the computing one
LAUNCHED: Final = (HOST_TO_DEVICE, DEVICE_TO_HOST, BETWEEN_DEVICES)  # streams of a device that launches


class OffloadedModel:
    """A loaded model, its device, and the threads that keep both busy."""

    def __init__(
        self, model: CausalLM, config: EngineConfig, trace: Trace | None = None, devices: DeviceGroup | None = None
    ) -> None:
        """Take a model whose experts are in main memory and whose other weights are on the device.

        `devices`: those of other ranks share each layer.

        Raises: CapacityError if the device lacks memory; ConfigError if devices cannot share such a model's layers.
        """
        assert config.offload is not None
        self.config = model.config
        self._model = model
        self._config = config.offload
        self._pipeline = OFFLOADING[config.offload.pipeline]
        sizes = (config.offload.micro_batch_tokens, config.offload.prompt_micro_batch_tokens)
        self._cut = Cut(*sizes, config.offload.window_blocks, self._pipeline.attends_on_host)
        self._is_shared = devices is not None
        self.device = make_device(config.offload if devices is None else config.offload.beside(devices.size))
        costs = costs_of(shape_of_rank(model.config, config.parallel), config)
        self.device.memory.take(_bytes_outside_experts(model), "weights outside of experts")
        num_bytes = activation_bytes(costs, config.scheduler, *sizes)
        self.device.memory.take(int(num_bytes), "activations")
        self._kv = self._place_kv(config)
        self._host, self._side = _sides(model, self.device.torch_device)
        places = place_experts(model.layers, config.offload.num_resident_experts, self.device)
        self._weights, self._halves = places.weights, places.halves
        has_experts = [bool(size) for size in self._sharable_bytes]
        self._share = HostExpertSplit(costs, has_experts, self._num_sharable, config.offload.num_hosted_experts)
        given = (model, places.halves, self._weights, self._kv, self.device, costs, self._share)
        self._ops = DividedExpertOps(*given) if devices is None else SharedLayerOps(devices, devices.size, *given)
        self._costs = costs
        self._is_warm = False
        self.row_order: Tensor | None = None  # of the last pass: its rows as its micro-batches have them
        launching = LAUNCHED if self.device.launches else ()
        lanes = LANES if devices is None else (*LANES, BETWEEN_DEVICES)
        self._lanes = {name: Lane(name, trace=trace) for name in lanes if name not in launching}
        self._executor = Executor(self._ops.by_name(), self._lanes, launching=launching, trace=trace)

    packed_layers: Final = None

    def __call__(self, token_ids: Tensor, context: ForwardContext) -> Tensor:
        """Do as `CausalLM` does: return the hidden states after the final norm; writes K and V of every token.

        Shapes: token_ids [T] int64 -> [T, H]. Raises: what an op raises; the next pass begins anew.
        """
        with self.device.computing(0, 0):
            micro_batches = cut_pass(token_ids, context, self._host, self._side, self._cut)
        self.device.synchronize()
        for num_bytes, seconds in self._weights.uploads():
            self._share.uploaded(num_bytes, seconds)
        self._share.begin_pass(len(token_ids), self._num_read_on_host(micro_batches), len(micro_batches))
        skipped = [border * size for border, size in zip(self._share.borders, self._sharable_bytes, strict=True)]
        pipeline = self._pipeline_of(micro_batches)
        is_kept = self._weights.begin_pass(len(micro_batches) if pipeline.is_paged else 1, skipped)
        self._kv.begin_pass(context.kv)
        self._ops.begin_pass(micro_batches)
        was_warm, self._is_warm = self._is_warm and is_kept, False
        wraps = self.config.num_layers > 1
        try:
            self._executor.run(self._tasks(pipeline, micro_batches, is_warm=was_warm, wraps=wraps))
        except BaseException:
            self.device.synchronize()
            self._weights.forget()
            raise
        self._is_warm = wraps and self._pipeline is not SEQUENTIAL
        with self.device.computing(0, 0):
            hidden = torch.cat([micro_batch.tensors["hidden"] for micro_batch in micro_batches])
            self.row_order = rows = torch.cat([micro_batch.rows for micro_batch in micro_batches])
            hidden = torch.empty_like(hidden).index_copy_(0, rows, hidden)
        self.device.synchronize()
        return hidden

    def _num_read_on_host(self, micro_batches: Sequence[MicroBatch]) -> float:
        """Return the positions that the host attends to, in the average layer."""
        number = sum(each.num_read for each in micro_batches if not each.attends_on_device)
        return number * (1 - self._kv.num_resident / self.config.num_layers)

    def _pipeline_of(self, micro_batches: Sequence[MicroBatch]) -> Pipeline:
        """Return the pipeline of a pass: one that attends on the device, if all of the pass does."""
        is_fixed = self._pipeline is SEQUENTIAL or not self._pipeline.has_kv_on_host or self._share.num_hosted
        if is_fixed or not all(each.attends_on_device for each in micro_batches):
            return self._pipeline
        return OFFLOADING["flexgen"] if loads_kv(micro_batches) else PROMPTS

    def _tasks(
        self, pipeline: Pipeline, micro_batches: Sequence[MicroBatch], *, is_warm: bool, wraps: bool
    ) -> Iterator[Task]:
        make_tasks = pipeline.make_sharing_tasks if self._share.num_hosted else pipeline.make_tasks
        assert make_tasks is not None, "experts are shared in pipelines only that may"
        tasks = make_tasks(self.config.num_layers, len(micro_batches), is_warm=is_warm, wraps=wraps)
        on_device = [each.attends_on_device for each in micro_batches]
        if pipeline.attends_on_host and (self._kv.num_resident or any(on_device)):
            tasks = attending_on_device(tasks, self._kv.is_resident, on_device.__getitem__)
        return sharing_layers(tasks) if self._is_shared else tasks

    def logits(self, hidden: Tensor) -> Tensor:
        """Shapes: hidden [S, H] from a pass -> [S, V] float32."""
        work = self._costs.head(len(hidden))
        self.device.synchronize()  # these rows may just have been selected on another stream
        with self.device.computing(int(work.num_bytes), int(work.num_flops)):
            return self._model.logits(hidden).cpu()

    def moe_blocks(self) -> Iterator[tuple[str, MoE]]:
        """Yield (prefix of its checkpoint names, block) of the layers with experts, several copies of each block."""
        for (prefix, block), halves in zip(self._model.moe_blocks(), self._routed_halves(), strict=True):
            copies = {id(it): it for it in (block, *halves)}
            yield from ((prefix, copy) for copy in copies.values())

    def _routed_halves(self) -> Iterator[list[MoE]]:
        for halves in self._halves:
            blocks = [layer.mlp for layer in halves if isinstance(layer.mlp, MoE)]
            if blocks:
                yield blocks

    def close(self) -> None:
        """End the threads."""
        for lane in self._lanes.values():
            lane.close()

    def _place_kv(self, config: EngineConfig) -> OffloadedKV:
        shape, limits = shape_of_rank(self._model.config, config.parallel), config.scheduler
        kv_shape = KVShape(
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            heads=[shape.attention.heads_of(layer) for layer in range(shape.num_layers)],
            dtype=getattr(torch, config.kv_dtype),
        )
        return OffloadedKV(
            kv_shape,
            self.device,
            num_resident=self._config.num_resident_kv_layers,
            window_blocks=self._config.window_blocks,
        )

    @cached_property
    def _sharable_bytes(self) -> list[int]:
        """Return of each layer the bytes of an expert that the host may compute; 0: of that layer it computes none."""
        sizes = []
        for layer in self._model.layers:
            experts = layer.movable_experts if layer.has_router else None
            sizes.append(0 if experts is None else experts.storage[0].nbytes)
        return sizes

    @property
    def _num_sharable(self) -> int:
        """Return how many experts of a layer the host may compute: as many as are streamed."""
        if self._pipeline.make_sharing_tasks is None or not any(self._sharable_bytes):
            return 0
        return self.config.routing.num_experts - self._config.num_resident_experts


def make_device(config: OffloadConfig) -> EmulatedDevice | CudaDevice:
    """Return the device that is asked for. Raises: CapacityError."""
    if config.cuda is not None:
        return CudaDevice(config.cuda)
    assert config.emulated is not None, "one of them is configured"
    return EmulatedDevice(config.emulated)


def _sides(model: CausalLM, device: torch.device) -> tuple[Side, Side]:
    """Return the host, which computes in float32, and the device; one and the same where nothing differs."""
    here = torch.device("cpu")
    host = Side(
        here, RotaryEmbeddings(model.config.attention.ropes, model.config.attention.head_dim, here), torch.float32
    )
    if device == here and model.dtype == torch.float32:
        return host, host
    return host, Side(device, model.rotary, model.dtype)


def _bytes_outside_experts(model: CausalLM) -> int:
    """Return what all other weights take."""
    experts = {address for layer in model.layers for address in _expert_addresses(layer)}
    sizes: dict[int, int] = {}
    for _, destination in model.named_weights():
        weight = _memory(destination)
        if weight.data_ptr() not in experts:
            sizes[weight.data_ptr()] = weight.nbytes
    return sum(sizes.values())


def _expert_addresses(layer: DecoderLayer) -> Iterator[int]:
    """Yield where the matrices of experts are."""
    experts = layer.movable_experts
    if experts is None:
        return
    parts: Sequence[tuple[Destination, ...]] = experts.parts()
    for part in chain.from_iterable(parts):
        yield _memory(part).data_ptr()


def _memory(destination: Destination) -> Tensor:
    if isinstance(destination, Rearranged):  # a rank's rows or columns
        ((destination, _),) = destination.places
    assert not isinstance(destination, PackedUpProjection | PlanarRows | Rearranged), "no such weights are streamed"
    return destination.weight.storage if isinstance(destination, PackedRows) else destination
