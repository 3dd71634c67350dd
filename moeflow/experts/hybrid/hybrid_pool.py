"""The experts of all layers on both processors."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from moeflow.core.out_of_memory import out_of_memory_as
from moeflow.experts.hybrid.expert_stream import ExpertStream
from moeflow.experts.hybrid.hybrid_experts import HybridLayers
from moeflow.experts.hybrid.lanes import lanes_of
from moeflow.experts.hybrid.moves import SlotMover
from moeflow.experts.hybrid.popularity import Popularity
from moeflow.experts.hybrid.seam import Seam, Step
from moeflow.experts.hybrid.shared_sums import GPUSums, SharedSums
from moeflow.experts.hybrid.slab_copies import PinnedMemory

logger = logging.getLogger(__name__)

_NO_ROOM: Final = (
    "The GPU has no memory for the buffers of experts: raise its limit (--gpu-memory), or take a smaller weight format"
)


class HybridCounters(msgspec.Struct, frozen=True):
    """Counts since the start."""

    num_gpu_pairs: int  # of token and expert, in passes that both processors compute
    num_cpu_pairs: int
    num_gpu_hits: int  # experts of layers that passes needed, and the GPU had
    num_cpu_hits: int  # all others
    num_moves: int
    num_streamed_passes: int
    cpu_s: float  # the CPU computed experts; the GPU waits after its own ones
    gpu_s: float  # the CPU waited for the GPU


class HybridPool:
    """Decides before each pass which experts are on the GPU, and how the pass computes all others."""

    def __init__(self, layers: HybridLayers, num_rows: int, top_k: int) -> None:
        """Take loaded layers, and fill their slots from main memory.

        `num_rows` bounds a pass, with padding. Raises: CapacityError if the GPU lacks memory; ConfigError.
        """
        self._layers, self._config, self._tables = layers, layers.config, layers.tables
        packed, self._lanes = layers.experts[0].packed, lanes_of(layers.device)
        self.popularity = Popularity(len(layers.experts), self._tables.num_experts)
        if self._config.popularity_file:
            self.popularity.read(Path(self._config.popularity_file))
        blocks = [] if layers.disk else [it.packed.storage for it in layers.experts]
        self._pinned = PinnedMemory(blocks, layers.device)
        self.takes_graphs = True
        self._num_gpu_pairs = self._num_cpu_pairs = self._num_streamed = 0
        self._num_gpu_hits = self._num_cpu_hits = 0
        has_all = self._config.num_gpu_experts == self._tables.num_experts
        with out_of_memory_as(_NO_ROOM):
            self._seam = Seam(self._lanes, layers.device, num_rows, packed.hidden, top_k + layers.num_joined)
            self._shared, self._mover = SharedSums(self._seam, top_k), SlotMover(layers, self._lanes)
            self._stream = ExpertStream(layers, self._lanes) if self._config.stream_tokens and not has_all else None
            self._fill()
        layers.way = self._short_way = GPUSums() if has_all else self._shared

    @property
    def num_slots(self) -> int:
        """Experts on the GPU, of all layers."""
        return self._config.num_gpu_experts * len(self._layers.experts)

    @property
    def is_on_gpu(self) -> NDArray[np.bool_]:
        """Whether the GPU computes each expert: [layers, E]."""
        return self._tables.is_on_gpu

    def begin_pass(self, num_tokens: int) -> None:
        """Move experts, and choose the way for a pass of so many tokens. No other pass is running.

        Blocks: while experts come from disk. Raises: StorageError if one cannot be read.
        """
        self._end_run()  # of kernels that were tried before the first pass
        self._shared.begin_pass(num_tokens)
        num_free = self._mover.settle()
        is_streamed = self._stream is not None and num_tokens >= self._config.stream_tokens
        if num_free and not is_streamed:  # else the link has more to copy
            self._mover.begin(self.popularity.moves(self._tables.is_on_gpu, num_free))
        self._tables.publish()
        self.takes_graphs = not is_streamed
        self._layers.way = self._short_way
        if is_streamed and self._stream is not None:
            self._stream.begin_pass()
            self._layers.way = self._stream
            self._num_streamed += 1

    def end_pass(self) -> None:
        """Count the choices of a pass. One that streams needs all experts."""
        self._end_run()
        ids, is_on_gpu = self._shared.choices(), self._tables.is_on_gpu
        is_used = np.full_like(is_on_gpu, fill_value=self._layers.way is self._stream)
        if ids is not None:
            layers = np.arange(len(ids))[:, None, None]
            is_used[layers, ids] = True
            num_on_gpu = int(np.count_nonzero(is_on_gpu[layers, ids]))
            self._num_gpu_pairs += num_on_gpu
            self._num_cpu_pairs += ids.size - num_on_gpu
            self.popularity.observe(ids)
        self._num_gpu_hits += int(np.count_nonzero(is_used & is_on_gpu))
        self._num_cpu_hits += int(np.count_nonzero(is_used & ~is_on_gpu))

    def drop_pass(self) -> None:
        """Forget a pass that failed. Blocks: until the GPU is idle."""
        self._end_run()
        self._seam.reset()

    def cut_by(self, cut: Callable[[Step], None]) -> AbstractContextManager[None]:
        """Give the host's steps of a pass to `cut`, in place of running them, as long as the result is entered."""
        return self._seam.cut_by(cut)

    def counters(self) -> HybridCounters:
        """Return the counts as they are now."""
        return HybridCounters(
            num_gpu_pairs=self._num_gpu_pairs,
            num_cpu_pairs=self._num_cpu_pairs,
            num_gpu_hits=self._num_gpu_hits,
            num_cpu_hits=self._num_cpu_hits,
            num_moves=self._mover.num_moves,
            num_streamed_passes=self._num_streamed,
            cpu_s=self._seam.computed_s,
            gpu_s=self._seam.waited_s,
        )

    def close(self) -> None:
        """Let the memory go that the GPU copies from. Blocks: until the GPU is idle."""
        self._end_run()
        self._lanes.synchronize()
        self._pinned.close()

    def _end_run(self) -> None:
        if self._layers.runs is not None:
            self._layers.runs.end()

    def _fill(self) -> None:
        """Fill the slots with the most popular experts."""
        for experts in self._layers.experts:
            experts.loaded()
            self._mover.fill(experts.layer, self.popularity.most_chosen(experts.layer, self._config.num_gpu_experts))
        self._tables.publish()
        self._lanes.synchronize()
