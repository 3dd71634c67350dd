"""From a checkpoint to a slab file: every expert packed as the kernels read it, a few at a time in memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.checkpoint.identity import checkpoint_identity
from moeflow.core.model_config import ModelConfig
from moeflow.kernels import cpu
from moeflow.kernels.cpu import PackedExperts
from moeflow.kernels.weight_format import WeightFormat
from moeflow.layers.moe import MoE
from moeflow.memory.slab_file import SlabSpec
from moeflow.memory.slab_writer import OnBytes, build_slab_file
from moeflow.models.loading import fill, outline


def slab_spec(checkpoint: Checkpoint, shape: ModelConfig, weight_format: WeightFormat) -> SlabSpec:
    """Return what the slab file of a model with experts holds."""
    return SlabSpec(
        identity=checkpoint_identity(checkpoint),
        weight_format=weight_format,
        num_layers=shape.num_layers - len(shape.dense_layers),
        num_experts=shape.num_experts,
        slab_bytes=cpu.expert_bytes(shape.hidden_size, shape.intermediate_size, weight_format),
    )


def pack_experts(
    checkpoint: Checkpoint,
    target: Path,
    weight_format: WeightFormat,
    *,
    num_threads: int = 1,
    on_bytes: OnBytes | None = None,
) -> SlabSpec:
    """Write the slab file of a model with experts, or what an interrupted run left of it to be written.

    Raises: CheckpointError if the checkpoint's tensors are not those of its config; else as `build_slab_file`.
    """
    model = outline(checkpoint)
    spec = slab_spec(checkpoint, model.config, weight_format)
    layers = [(f"model.layers.{i}", layer.mlp) for i, layer in enumerate(model.layers)]
    blocks = [(prefix, block) for prefix, block in layers if isinstance(block, MoE)]
    free: SimpleQueue[PackedExperts] = SimpleQueue()
    for _ in range(num_threads + 1):
        shape = model.config
        free.put(PackedExperts(1, shape.hidden_size, shape.intermediate_size, weight_format))

    def pack(layer: int, expert: int) -> tuple[int, int, PackedExperts]:
        prefix, block = blocks[layer]
        packed = free.get()
        ((gate, up, down),) = packed.parts()
        fill(checkpoint, zip(block.expert_names(prefix, expert), (gate, up, down), strict=True))
        return layer, expert, packed

    with build_slab_file(target, spec, on_bytes) as writer, _threads(num_threads) as threads:
        ahead: deque[Future[tuple[int, int, PackedExperts]]] = deque()
        missing = iter(writer.missing())
        while True:
            room = range(num_threads + 1 - len(ahead))
            ahead += [threads.submit(pack, *place) for _, place in zip(room, missing, strict=False)]
            if not ahead:
                break
            layer, expert, packed = ahead.popleft().result()
            writer.write(layer, expert, packed.storage[0].numpy().data)
            free.put(packed)
    return spec


@contextmanager
def _threads(count: int) -> Iterator[ThreadPoolExecutor]:
    """Yield threads that take up nothing new after an error or Ctrl-C."""
    with ThreadPoolExecutor(count) as threads:
        try:
            yield threads
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise
