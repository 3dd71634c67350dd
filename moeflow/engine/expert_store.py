"""The experts of a model that come from disk: combines slots, disk reader, cache and prefetching.

Owns the reading threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from time import perf_counter, perf_counter_ns
from typing import Any, TypeVar, cast

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.checkpoint.packed.file_io import drop_cached_file
from moeflow.checkpoint.packed.layout import SlabIndex, SlabSpec
from moeflow.checkpoint.packed.reader import SlabReader
from moeflow.core.batch import Batch
from moeflow.core.engine_config import EngineConfig, ExpertSlotsConfig, RemoteExpertsConfig
from moeflow.core.engine_messages import ExpertStats, LenderStats, trial_stats
from moeflow.core.model_config import ModelConfig
from moeflow.core.request import Request
from moeflow.experts.cache.expert_cache import ExpertCache
from moeflow.experts.cache.policies import POLICIES
from moeflow.experts.cached_experts import ExpertPool
from moeflow.experts.disk_reader import DiskReader, probe_read_depth
from moeflow.experts.elastic_slots import ElasticSlots
from moeflow.experts.prefetch.driver import PrefetchDriver
from moeflow.experts.prefetch.source import Source
from moeflow.experts.remote.borrowing import borrowing_of
from moeflow.experts.remote.lender_costs import ExpertSize
from moeflow.experts.remote.remote_experts import RemoteExperts
from moeflow.experts.slot_arena import SlotArena, num_slots_in
from moeflow.experts.spans import EXPERTS, WAITS, Spanned, untraced
from moeflow.kernels.cpu import extension
from moeflow.kernels.cpu.packed_experts import PackedExperts
from moeflow.kernels.weight_format import WeightFormat
from moeflow.models.layers.moe import expert_kind
from moeflow.models.registry import read_model_config
from moeflow.parallel.tcp.cluster_token import read_token
from moeflow.pipeline.runtime.trace import Label, Trace, TraceRow
from moeflow.planner.choices.packed_files import ensure_packed_weights_file

T = TypeVar("T")


class ExpertStore:
    """The experts of a model that come from disk."""

    def __init__(
        self,
        index: SlabIndex,
        shape: ModelConfig,
        config: ExpertSlotsConfig,
        *,
        memory_bytes: int = 0,
        is_wide: bool = False,
        trace: Trace | None = None,
    ) -> None:
        """Open the packed weights and reserve the slots; `memory_bytes` limits the whole process, 0: no limit.

        `is_wide` as in `PackedWeight`.

        Raises: CheckpointError, CapacityError.
        """
        self._memory_bytes = memory_bytes
        self._pass_began_s = 0.0
        self.index = index
        self._spec = spec = index.spec
        max_slots = max(min(num_slots_in(memory_bytes, spec.slab_bytes), spec.num_slabs), config.num_slots)
        arena = SlotArena(max_slots, spec.slab_bytes)
        with ExitStack() as on_failure:
            self._reader = SlabReader(index, arena.view(0))
            on_failure.callback(self._reader.close)
            depth = probe_read_depth(self._reader, arena, config.num_slots)
            arena.give_back(0)
            numbers = _layer_numbers(shape)
            trace = trace or Trace(is_on=False)
            self._disk = DiskReader(self._reader, arena, num_threads=depth, trace=trace, layer_numbers=numbers)
            on_failure.callback(self._disk.close)
            self.cache = ExpertCache(
                num_layers=spec.num_layers,
                num_experts=spec.num_experts,
                num_slots=config.num_slots,
                slab_bytes=spec.mean_slab_bytes,
                policy=POLICIES[config.policy](spec.num_layers, spec.num_experts),
                start_loads=self._disk.start_loads,
                wait=self._disk.wait,
            )
            self.slots = ElasticSlots(self.cache, arena)
            views = _views(arena, shape, spec, is_wide=is_wide)
            self.pool = ExpertPool(self.cache, views[0], slots_of_layers=views if spec.expert_formats else ())
            self.pool.fetcher = self._disk
            self._disk.serve(self.cache)
            self._before = self.cache.stats()
            self.prefetch = PrefetchDriver[Batch](self.cache)
            self.pool.remote = self._remote_experts(config.remote, shape, is_wide=is_wide)
            on_failure.pop_all()
        trace.follow(partial(self._trace_experts, traced_on(self._disk.computing, spec.mean_slab_bytes, numbers)))

    def _trace_experts(self, traced: Spanned, is_on: bool) -> None:
        self.pool.spanned = traced if is_on else untraced

    def _remote_experts(
        self, config: RemoteExpertsConfig | None, shape: ModelConfig, *, is_wide: bool
    ) -> RemoteExperts | None:
        """Begin to place experts in other machines' memory. Raises: ConfigError without a token."""
        if config is None:
            return None
        spec = self._spec
        size = ExpertSize(spec.slab_bytes, shape.hidden_size, shape.feed_forward.intermediate_size)
        borrowing = borrowing_of(spec, shape, cpu_isa=extension.isa_name(), is_wide=is_wide)
        token = read_token(Path(config.token_file))
        addresses = [(it.host, it.port) for it in config.lenders]
        return RemoteExperts(addresses, token, borrowing, size, self.cache, self._reader.read)

    @classmethod
    def open(
        cls,
        checkpoint: Checkpoint,
        config: EngineConfig,
        *,
        on_bytes: Callable[[int, int], None] | None = None,
        trace: Trace | None = None,
    ) -> ExpertStore:
        """Open the packed weights of a checkpoint, after packing if they do not exist.

        Raises: ConfigError, CheckpointError, CapacityError.
        """
        assert config.experts is not None
        file = Path(config.experts.packed_weights_file)
        index = ensure_packed_weights_file(checkpoint, file, config, on_bytes)
        if config.memory is not None:  # packing has filled the page cache, which may be limited as well
            for file in checkpoint.tensors.files:
                drop_cached_file(file)
        shape = read_model_config(checkpoint)
        return cls(index, shape, config.experts, memory_bytes=config.memory_bytes, is_wide=config.is_wide, trace=trace)

    def prefetch_by(self, sources: Sequence[Source[Batch]]) -> None:
        """Prefetch the experts that sources rank."""
        self.prefetch = self.pool.prefetch = PrefetchDriver(self.cache, sources)

    def expect(self, request: Request) -> None:
        """Receive a request of a later pass."""
        self.prefetch.expect(request)

    def count_anew(self) -> None:
        """Leave experts that were read until now out of the statistics."""
        self._before = self.cache.stats()

    def begin_pass(self, batch: Batch) -> None:
        """Begin a pass. Blocks: while prefetch sources compute."""
        self._pass_began_s = perf_counter()
        self.cache.begin_pass()
        self.prefetch.begin_pass(batch)
        if self.pool.remote is not None:
            self.pool.remote.begin_pass()

    def end_pass(self, num_tokens: int) -> None:
        """End a pass without an error."""
        if self.pool.remote is not None:
            self.pool.remote.end_pass(perf_counter() - self._pass_began_s)
        self.prefetch.end_pass(num_tokens)

    def drop_pass(self) -> None:
        """End a failed pass."""
        self.prefetch.drop_pass()

    @property
    def stall_s(self) -> float:
        """Seconds that passes have waited for experts."""
        return self.cache.stall_s

    def stats(self) -> ExpertStats:
        """Return the counters as they are now."""
        now, remote = self.cache.stats() - self._before, self.pool.remote
        return ExpertStats(
            memory_limit_bytes=self._memory_bytes,
            expert_slots=self.cache.num_slots,
            experts_in_slots=self.cache.num_resident,
            experts_on_disk=self._spec.num_slabs,
            is_prefetching=self.prefetch.is_on,
            trials=trial_stats([*self.prefetch.trials, *([] if remote is None else remote.trials)]),
            expert_hits_total=now.hits,
            expert_late_total=now.late,
            expert_misses_total=now.misses,
            expert_stall_s_total=now.stall_s,
            expert_demand_bytes_total=now.demand_bytes,
            expert_prefetched_bytes_total=now.prefetched_bytes,
            expert_used_bytes_total=now.used_bytes,
            expert_wasted_bytes_total=now.wasted_bytes,
            **({} if remote is None else remote_stats(remote)),
        )

    def close(self) -> None:
        """End the reading threads. Blocks: until reads under way end."""
        with ExitStack() as closing:  # from the last to the first
            closing.callback(self._reader.close)
            closing.callback(self._disk.close)
            closing.callback(self.cache.drain)
            closing.callback(self.prefetch.close)
            if self.pool.remote is not None:
                closing.callback(self.pool.remote.close)


def remote_stats(remote: RemoteExperts) -> dict[str, Any]:
    """Return the statistics about experts at lenders."""
    counters = [lender.counters for lender in remote.lenders]
    return {
        "experts_remote": int(remote.placed.sum()),
        "remote_pairs_total": sum(it.num_pairs for it in counters),
        "remote_bytes_total": sum(it.num_bytes for it in counters),
        "remote_wait_s_total": sum(it.waited_s for it in counters),
        "lenders": [
            LenderStats(address=it.where, state=it.state, num_experts=int(it.has.sum())) for it in remote.lenders
        ],
    }


def _views(arena: SlotArena, shape: ModelConfig, spec: SlabSpec, *, is_wide: bool) -> list[PackedExperts]:
    """Return the kernels' view of the slots for each layer with experts; one for all if formats are the same."""
    made: dict[tuple[str, str], PackedExperts] = {}
    formats_of_layers = spec.expert_formats or ((spec.weight_format, spec.weight_format),)
    for formats in formats_of_layers:
        if formats not in made:
            up, down = (cast(WeightFormat, name) for name in formats)
            made[formats] = PackedExperts(
                arena.num_slots,
                shape.hidden_size,
                shape.feed_forward.intermediate_size,
                up,
                down_format=down,
                kind=expert_kind(shape),
                is_wide=is_wide,
                storage=arena.slots,
            )
    return [made[formats] for formats in formats_of_layers]


def _layer_numbers(shape: ModelConfig) -> tuple[int, ...]:
    """Return the number of each layer with experts among all layers; the encoder's come first."""
    before = shape.num_encoder_layers
    dense = () if shape.encoder is None else shape.encoder.dense_layers
    return (*(layer for layer in range(before) if layer not in dense), *(before + layer for layer in shape.moe_layers))


def traced_on(row: TraceRow, slab_bytes: int, layer_numbers: Sequence[int]) -> Spanned:
    """Return a caller of functions that records their times and the bytes of their experts on a row.

    `layer_numbers` are those of the layers with experts among all layers.
    """

    def spanned(name: str, layer: int, function: Callable[..., T], /, *args: Any) -> T:
        start_ns = perf_counter_ns()
        try:
            return function(*args)
        finally:
            num_bytes = len(args[0]) * slab_bytes if name == EXPERTS else 0
            label = Label(name, layer_numbers[layer], num_bytes=num_bytes)
            row.record(label, start_ns, perf_counter_ns(), is_blocked=name == WAITS)

    return spanned
