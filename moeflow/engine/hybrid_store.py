"""The experts of a model that are on a GPU and on the CPU, as the runner of passes uses them."""

from __future__ import annotations

from moeflow.core.batch import Batch
from moeflow.core.engine_config import EngineConfig, SchedulerConfig
from moeflow.core.engine_messages import ExpertStats
from moeflow.core.graph_sizes import captured_sizes
from moeflow.core.request import Request
from moeflow.experts.hybrid.hybrid_experts import HybridLayers
from moeflow.experts.hybrid.hybrid_pool import HybridPool


class HybridStore:
    """The experts of a loaded model."""

    stall_s = 0.0  # passes never wait for a disk

    def __init__(self, layers: HybridLayers, config: EngineConfig, top_k: int) -> None:
        """Fill the GPU's slots. Raises: CapacityError if the GPU lacks memory; ConfigError."""
        self.pool = HybridPool(layers, _most_rows(config.scheduler, layers.config.stream_tokens), top_k)

    def expect(self, request: Request) -> None:
        """Receive a request of a later pass, which changes nothing."""

    def begin_pass(self, batch: Batch) -> None:
        """Begin a pass."""
        self.pool.begin_pass(batch.num_tokens)

    def end_pass(self, num_tokens: int) -> None:
        """End a pass without an error."""
        self.pool.end_pass()

    def drop_pass(self) -> None:
        """End a failed pass. Blocks: until the GPU is idle."""
        self.pool.drop_pass()

    def stats(self) -> ExpertStats:
        """Return the counters as they are now."""
        now = self.pool.counters()
        return ExpertStats(
            experts_on_gpu=self.pool.num_slots,
            gpu_pairs_total=now.num_gpu_pairs,
            cpu_pairs_total=now.num_cpu_pairs,
            cpu_experts_s_total=now.cpu_s,
            cpu_wait_s_total=now.gpu_s,
            streamed_passes_total=now.num_streamed_passes,
            expert_moves_total=now.num_moves,
        )

    def close(self) -> None:
        """Let main memory go that the GPU copies from."""
        self.pool.close()


def _most_rows(scheduler: SchedulerConfig, stream_tokens: int) -> int:
    """Return the tokens at most of a pass that both processors compute, with the padding of captured passes."""
    tokens = scheduler.max_num_batched_tokens
    return max(min(tokens, stream_tokens or tokens), captured_sizes(scheduler.max_num_seqs)[-1])
