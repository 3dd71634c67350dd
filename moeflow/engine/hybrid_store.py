"""The experts of a model that are on a GPU and on the CPU, as the runner of passes uses them."""

from __future__ import annotations

from contextlib import ExitStack

import msgspec

from moeflow.core.batch import Batch
from moeflow.core.engine_config import EngineConfig, SchedulerConfig
from moeflow.core.engine_messages import ExpertStats
from moeflow.core.graph_sizes import captured_sizes
from moeflow.core.request import Request
from moeflow.engine.expert_store import ExpertStore
from moeflow.experts.hybrid.hybrid_experts import HybridLayers
from moeflow.experts.hybrid.hybrid_pool import HybridPool


class HybridStore:
    """The experts of a loaded model."""

    def __init__(self, layers: HybridLayers, config: EngineConfig, top_k: int, disk: ExpertStore | None = None) -> None:
        """Fill the GPU's slots. `disk` None: main memory has all experts.

        Raises: CapacityError if the GPU lacks memory; ConfigError; StorageError if an expert cannot be read.
        """
        self.disk = disk  # None: main memory has all experts
        self.pool = HybridPool(layers, _most_rows(config.scheduler, layers.config.stream_tokens), top_k)
        self._leave_to_gpu()
        if disk is not None:
            disk.count_anew()

    @property
    def stall_s(self) -> float:
        """Seconds that passes have waited for a disk."""
        return 0.0 if self.disk is None else self.disk.stall_s

    def expect(self, request: Request) -> None:
        """Receive a request of a later pass, which changes nothing."""

    def begin_pass(self, batch: Batch) -> None:
        """Begin a pass. Blocks: while experts that move are read. Raises: StorageError if one cannot be read."""
        if self.disk is not None:
            self.disk.begin_pass(batch)
        self.pool.begin_pass(batch.num_tokens)
        self._leave_to_gpu()

    def end_pass(self, num_tokens: int) -> None:
        """End a pass without an error."""
        self.pool.end_pass()
        if self.disk is not None:
            self.disk.end_pass(num_tokens)

    def drop_pass(self) -> None:
        """End a failed pass. Blocks: until the GPU is idle."""
        self.pool.drop_pass()
        if self.disk is not None:
            self.disk.drop_pass()

    def stats(self) -> ExpertStats:
        """Return the counters as they are now."""
        now = self.pool.counters()
        in_memory = ExpertStats(expert_hits_total=now.num_cpu_hits, experts_in_slots=self.pool.is_on_gpu.size)
        return msgspec.structs.replace(
            in_memory if self.disk is None else self.disk.stats(),
            experts_on_gpu=self.pool.num_slots,
            gpu_hits_total=now.num_gpu_hits,
            gpu_pairs_total=now.num_gpu_pairs,
            cpu_pairs_total=now.num_cpu_pairs,
            cpu_experts_s_total=now.cpu_s,
            cpu_wait_s_total=now.gpu_s,
            streamed_passes_total=now.num_streamed_passes,
            expert_moves_total=now.num_moves,
        )

    def close(self) -> None:
        """Let main memory go that the GPU copies from, and end reading threads."""
        with ExitStack() as closing:
            if self.disk is not None:
                closing.callback(self.disk.close)
            self.pool.close()

    def _leave_to_gpu(self) -> None:
        """Free the slots in main memory of the GPU's experts."""
        if self.disk is not None:
            self.disk.cache.leave(self.pool.is_on_gpu.ravel())


def _most_rows(scheduler: SchedulerConfig, stream_tokens: int) -> int:
    """Return the tokens at most of a pass that both processors compute, with the padding of captured passes."""
    tokens = scheduler.max_num_batched_tokens
    return max(min(tokens, stream_tokens or tokens), captured_sizes(scheduler.max_num_seqs)[-1])
