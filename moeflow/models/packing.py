"""From a checkpoint to packed weights: packed as the kernels read them, experts a few at a time in memory."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.checkpoint.identity import checkpoint_identity
from moeflow.checkpoint.packed.file_io import whole_pages
from moeflow.checkpoint.packed.layout import SlabSpec
from moeflow.checkpoint.packed.reader import OnBytes
from moeflow.checkpoint.packed.weight_memory import LaidOutMemory, NotedMemory, WeightMemory
from moeflow.checkpoint.packed.writer import SlabWriter, build_packed_weights_file
from moeflow.core.model_config import ModelConfig
from moeflow.core.sha256 import sha256
from moeflow.kernels.arrays import FLOAT32, address, dtype_name
from moeflow.kernels.cpu.latent_weights import PackedUpProjection
from moeflow.kernels.cpu.packed_experts import PackedExperts, expert_bytes
from moeflow.kernels.cpu.packed_weight import PackedRows
from moeflow.kernels.lazy_memory import LazyMemory
from moeflow.kernels.triton.planar_rows import PlanarRows
from moeflow.kernels.weight_format import WeightFormat
from moeflow.models.importance import NO_IMPORTANCE, Importance
from moeflow.models.layers.allocation.packed import PackedAllocator
from moeflow.models.layers.allocation.weight_formats import WeightFormats
from moeflow.models.layers.expert_weights import Destination
from moeflow.models.layers.layer_embeddings import TABLE_NAME
from moeflow.models.layers.moe import expert_kind
from moeflow.models.layers.rearranged import Rearranged
from moeflow.models.loading import fill, fill_in_threads, outline
from moeflow.models.registry import find_family, read_model_config

if TYPE_CHECKING:
    from moeflow.models.language_model import LanguageModel


def slab_spec(checkpoint: Checkpoint, formats: WeightFormats) -> SlabSpec:
    """Return what the packed weights of a model holds. Only headers are looked at."""
    shape = read_model_config(checkpoint)
    memory = NotedMemory()
    model = _build_resident(checkpoint, shape, formats, memory)
    has_experts = shape.routing.num_experts > 0
    sizes = _expert_sizes(shape, formats) if has_experts else []
    return SlabSpec(
        identity=checkpoint_identity(checkpoint),
        weight_format=formats.matrices,
        embedding_format=formats.embeddings,
        num_layers=shape.num_moe_layers,
        num_experts=shape.routing.num_experts,
        slab_bytes=max(sizes, default=0),
        resident_bytes=memory.num_bytes,
        layout=_layout(model, memory),
        expert_formats=tuple(_expert_formats(shape, formats)) if has_experts and formats.layers else (),
        slab_bytes_of_layers=tuple(sizes) if len(set(sizes)) > 1 else (),
    )


def largest_expert_bytes(shape: ModelConfig, formats: WeightFormats) -> int:
    """Return what an expert takes in the layer where it takes most."""
    return max(_expert_sizes(shape, formats))


def _expert_sizes(shape: ModelConfig, formats: WeightFormats) -> list[int]:
    """Return what an expert takes in each layer with experts; if that is the same in all, once."""
    size = (shape.hidden_size, shape.feed_forward.intermediate_size)
    return [
        expert_bytes(*size, up, down_format=down, is_gated=shape.feed_forward.is_gated)
        for up, down in _expert_formats(shape, formats)
    ]


def _expert_formats(shape: ModelConfig, formats: WeightFormats) -> list[tuple[WeightFormat, WeightFormat]]:
    """Return the formats of ups and downs in each layer with experts; if all have the same ones, once."""
    return (
        [formats.of_experts(formats.layers[number]) for number in shape.moe_layers]
        if formats.layers
        else [formats.of_experts(None)]
    )


def pack_model(
    checkpoint: Checkpoint,
    target: Path,
    formats: WeightFormats,
    *,
    num_threads: int = 1,
    on_bytes: OnBytes | None = None,
    importance: Importance = NO_IMPORTANCE,
) -> SlabSpec:
    """Write the packed weights of a model, or what an interrupted run left of it to be written.

    Memory holds all weights outside of experts, then a few experts at a time.

    Raises: CheckpointError if the checkpoint's tensors are not those of its config; else as
    `build_packed_weights_file`.
    """
    model = outline(checkpoint)
    spec = msgspec.structs.replace(slab_spec(checkpoint, formats), is_weighted=bool(importance))
    with build_packed_weights_file(target, spec, on_bytes) as writer:
        if writer.lacks_resident:
            is_dense = model.config.routing.num_experts == 0  # otherwise most of the work is experts
            packed = on_bytes if is_dense else None
            writer.write_resident(
                _resident_content(checkpoint, model.config, formats, spec, num_threads, packed, importance)
            )
        _write_experts(checkpoint, model, formats, spec, writer, num_threads, importance)
    return spec


def _resident_content(
    checkpoint: Checkpoint,
    shape: ModelConfig,
    formats: WeightFormats,
    spec: SlabSpec,
    num_threads: int,
    on_bytes: OnBytes | None,
    importance: Importance,
) -> memoryview:
    resident = LazyMemory(spec.resident_bytes).bytes
    model = _build_resident(checkpoint, shape, formats, LaidOutMemory(resident, is_filled=False))
    fill_in_threads(checkpoint, model.named_weights(), num_threads, on_bytes, importance)
    return resident.data


def _write_experts(
    checkpoint: Checkpoint,
    model: LanguageModel,
    formats: WeightFormats,
    spec: SlabSpec,
    writer: SlabWriter,
    num_threads: int,
    importance: Importance,
) -> None:
    shape = model.config
    blocks = list(model.moe_blocks())
    size, kind = (shape.hidden_size, shape.feed_forward.intermediate_size), expert_kind(shape)
    formats_of_layers = _expert_formats(shape, formats)
    are_alike = len(formats_of_layers) == 1
    free: SimpleQueue[NDArray[np.uint8]] = SimpleQueue()
    for _ in range(num_threads + 1 if blocks else 0):
        free.put(LazyMemory(spec.slab_bytes).bytes)

    def pack(layer: int, expert: int) -> tuple[int, int, NDArray[np.uint8]]:
        prefix, block = blocks[layer]
        whole = free.get()
        slab = whole[: spec.layer_bytes[layer]]
        up, down = formats_of_layers[0 if are_alike else layer]
        if not are_alike:
            slab.fill(0)  # of what fills up another layer's bands
        packed = PackedExperts(1, *size, up, down_format=down, kind=kind, storage=slab.reshape(1, -1))
        (parts,) = packed.parts()
        fill(checkpoint, zip(block.expert_names(prefix, expert), parts, strict=True), importance)
        return layer, expert, whole

    with _threads(num_threads) as threads:
        ahead: deque[Future[tuple[int, int, NDArray[np.uint8]]]] = deque()
        missing = iter(writer.missing())
        while True:
            room = range(num_threads + 1 - len(ahead))
            ahead += [threads.submit(pack, *place) for _, place in zip(room, missing, strict=False)]
            if not ahead:
                break
            layer, expert, whole = ahead.popleft().result()
            writer.write(layer, expert, whole[: spec.layer_bytes[layer]].data)
            free.put(whole)


def _build_resident(
    checkpoint: Checkpoint, shape: ModelConfig, formats: WeightFormats, memory: WeightMemory
) -> LanguageModel:
    """Return the model without its experts."""
    allocator = PackedAllocator(FLOAT32, None, formats, memory)
    return find_family(checkpoint).build(shape, allocator)


def names_in_part(checkpoint: Checkpoint, formats: WeightFormats, spec: SlabSpec, number: int) -> list[str]:
    """Return which of the checkpoint's tensors have weights in a part of the packed weights, for messages."""
    if number < spec.num_slabs:
        layer, expert = divmod(number, spec.num_experts)
        prefix, block = list(outline(checkpoint).moe_blocks())[layer]
        return block.expert_names(prefix, expert)
    memory = NotedMemory()
    model = _build_resident(checkpoint, read_model_config(checkpoint), formats, memory)
    starts = [0, *accumulate(whole_pages(block.nbytes) for block in memory.blocks)]
    first = spec.offset(number) - spec.resident_start
    last = first + spec.part_bytes(number) - 1
    blocks = range(bisect_right(starts, first) - 1, bisect_right(starts, last))
    return [name for name, block, *_ in _places(model, memory) if block in blocks]


def layer_table_range(checkpoint: Checkpoint, formats: WeightFormats, spec: SlabSpec) -> range:
    """Return where the packed weights have the table that embeds tokens for each layer; empty: there is none."""
    shape = read_model_config(checkpoint)
    if shape.embeddings.layer_embeddings is None:
        return range(0)
    memory = NotedMemory()
    model = _build_resident(checkpoint, shape, formats, memory)
    (number,) = (block for name, block, *_ in _places(model, memory) if name == TABLE_NAME)
    starts = list(accumulate((whole_pages(block.nbytes) for block in memory.blocks), initial=spec.resident_start))
    return range(starts[number], starts[number + 1])


def _layout(model: LanguageModel, memory: NotedMemory) -> str:
    """Return a hash over which weight is where, so that a model that is built otherwise takes no other's file."""
    return sha256(repr(_places(model, memory)).encode()).hexdigest()[:16]


def _places(model: LanguageModel, memory: NotedMemory) -> list[tuple[str, int, int, int, str]]:
    """Return each weight's block, its place in it, the first row's number, and its format."""
    numbers = sorted(range(len(memory.blocks)), key=lambda number: address(memory.blocks[number]))
    starts = [address(memory.blocks[number]) for number in numbers]

    def place(destination: Destination) -> tuple[int, int, int]:
        if isinstance(destination, PackedRows):
            begin, first_row = address(destination.weight.storage), int(destination.numbers[0])
        elif isinstance(destination, PackedUpProjection):
            begin, first_row = address(destination.keys.storage), 0
        else:
            begin, first_row = address(destination), 0
        at = bisect_right(starts, begin) - 1
        return numbers[at], begin - starts[at], first_row

    return [(name, *place(destination), _form(destination)) for name, destination in model.named_weights()]


def _form(destination: Destination) -> str:
    if isinstance(destination, PackedRows):
        return destination.weight.format
    if isinstance(destination, PackedUpProjection):
        return destination.keys.format
    assert not isinstance(destination, PlanarRows | Rearranged), "a GPU's weights are not packed"
    return f"torch.{dtype_name(destination.dtype)}"  # as all files have it


@contextmanager
def _threads(count: int) -> Iterator[ThreadPoolExecutor]:
    """Yield threads that take up nothing new after an error or Ctrl-C."""
    with ThreadPoolExecutor(count) as threads:
        try:
            yield threads
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise
