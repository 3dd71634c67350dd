"""Everything between packed weights and the experts of a model, put together: slots, reader, lane, cache.

Owns the threads that read and ends them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter, perf_counter_ns
from typing import Any, TypeVar, cast

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.checkpoint.packed.file_io import drop_cached_file
from moeflow.checkpoint.packed.layout import SlabIndex, SlabSpec
from moeflow.checkpoint.packed.reader import SlabReader
from moeflow.core.batch import Batch
from moeflow.core.engine_config import EngineConfig, ExpertSlotsConfig, RemoteExpertsConfig
from moeflow.core.model_config import ModelConfig
from moeflow.core.request import Request
from moeflow.core.trial import Trial
from moeflow.engine.expert_forecast import ExpertForecast, new_tokens
from moeflow.engine.followed_texts import FollowedTexts, named_by_layer
from moeflow.engine.input_forecast import InputForecast
from moeflow.engine.input_tables import InputTables
from moeflow.engine.messages import ExpertStats, LenderStats, trial_stats
from moeflow.experts.cache.expert_cache import ExpertCache
from moeflow.experts.cache.policies import POLICIES
from moeflow.experts.cached_experts import ExpertPool
from moeflow.experts.disk_fetcher import DiskFetcher
from moeflow.experts.disk_reader import DiskReader, probe_read_depth
from moeflow.experts.elastic_slots import ElasticSlots
from moeflow.experts.look_ahead import LookAhead
from moeflow.experts.predict.predictor import RoutedModel
from moeflow.experts.predict.registry import COMBINED, NO_PREDICTOR, PREDICTORS, WHOLE_PASS
from moeflow.experts.prefetcher import Prefetcher
from moeflow.experts.remote.borrowing import borrowing_of
from moeflow.experts.remote.lender_costs import ExpertSize
from moeflow.experts.remote.remote_experts import RemoteExperts
from moeflow.experts.slot_arena import SlotArena, num_slots_in
from moeflow.experts.spans import EXPERTS, WAITS, Spanned
from moeflow.kernels.cpu import extension
from moeflow.kernels.cpu.packed_experts import PackedExperts
from moeflow.kernels.weight_format import WeightFormat
from moeflow.models.expert_predictor.packed_network import for_serving
from moeflow.models.expert_predictor.saved import folders_of, is_saved, load_predictor
from moeflow.models.language_model import LanguageModel
from moeflow.models.layers.decoder import CausalLM
from moeflow.models.layers.moe import expert_kind
from moeflow.models.registry import read_model_config
from moeflow.parallel.tcp.cluster_token import read_token
from moeflow.pipeline.runtime.trace import Label, Row, Trace
from moeflow.planner.choices.packed_files import ensure_packed_weights_file

T = TypeVar("T")
COMPUTING = "experts"  # a trace's row of what the pass itself computes and waits for


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
        """Open the packed weights and reserve the slots; `memory_bytes` is what all together may take, 0: not limited.
        `is_wide` as in `PackedWeight`.

        Raises: CheckpointError, CapacityError.
        """
        self._memory_bytes = memory_bytes
        self._predictor_name = config.predictor
        self._prefetcher: Prefetcher | None = None
        self._forecasts: tuple[ExpertForecast | InputForecast, ...] = ()  # of whole passes
        self._texts: FollowedTexts | None = None  # of which a network says what the prefetcher's predictor weighs
        self.by_drafts: LookAhead | None = None  # reads what models that guess know of the next pass
        self._pass_began_s = self._stall_s = 0.0  # of the pass: its begin, and the waits before it
        self.index = index
        self._spec = spec = index.spec
        max_slots = max(min(num_slots_in(memory_bytes, spec.slab_bytes), spec.num_slabs), config.num_slots)
        arena = SlotArena(max_slots, spec.slab_bytes)
        with ExitStack() as on_failure:
            self._reader = SlabReader(index, arena.view(0))
            on_failure.callback(self._reader.close)
            depth = probe_read_depth(self._reader, arena, config.num_slots)
            arena.give_back(0)
            self._disk = DiskReader(self._reader, arena, num_threads=depth, trace=trace)
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
            self.pool.fetcher = DiskFetcher(self._disk, self.cache)
            self.cache.attach(self.pool.fetcher)
            self.pool.remote = self._remote_experts(config.remote, shape, is_wide=is_wide)
            on_failure.pop_all()
        if trace is not None:
            self.pool.spanned = traced_on(trace.row(COMPUTING), spec.mean_slab_bytes)

    def _remote_experts(
        self, config: RemoteExpertsConfig | None, shape: ModelConfig, *, is_wide: bool
    ) -> RemoteExperts | None:
        """Begin to place experts in other machines' memory. Raises: ConfigError if there is no token."""
        if config is None:
            return None
        spec = self._spec
        size = ExpertSize(spec.slab_bytes, shape.hidden_size, shape.intermediate_size)
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
        """Open the packed weights of a checkpoint, which is made first if it is not there.

        Raises: ConfigError, CheckpointError, CapacityError.
        """
        assert config.experts is not None
        file = Path(config.experts.packed_weights_file)
        index = ensure_packed_weights_file(checkpoint, file, config, on_bytes)
        if config.memory is not None:  # what packing has read lies in the page cache, which may be limited, too
            for file in {info.file for info in checkpoint.tensors.values()}:
                drop_cached_file(file)
        shape = read_model_config(checkpoint)
        return cls(index, shape, config.experts, memory_bytes=config.memory_bytes, is_wide=config.is_wide, trace=trace)

    def predict_for(self, model: LanguageModel, checkpoint: Checkpoint, tables: InputTables | None) -> None:
        """Read ahead for a model that was built on the pool, if a predictor is set; of an encoder's inputs by tables.

        Raises: CheckpointError if it has to be trained, and was not for this checkpoint.
        """
        name = self._predictor_name
        if name == NO_PREDICTOR:
            return
        if name == WHOLE_PASS:
            self._forecasts = tuple(self._whole_pass_forecasts(model, checkpoint, tables))
        else:
            folder, _ = folders_of(checkpoint.path, self.index.path)
            if name == COMBINED and isinstance(model, CausalLM) and is_saved(folder):
                self._texts = network_texts(folder, model, checkpoint)
            routers = [block for _, block in model.moe_blocks()]
            num_layers, num_experts = self._spec.num_layers, self._spec.num_experts
            routed = RoutedModel(num_layers, num_experts, routers, has_network=self._texts is not None)
            predictor = PREDICTORS[name](routed)
            self._prefetcher = self.pool.ahead = Prefetcher(self.cache, predictor, _trial(name), num_layers)
        self.by_drafts = LookAhead(self.cache, _trial("drafts", starts_on=True))

    def _whole_pass_forecasts(
        self, model: LanguageModel, checkpoint: Checkpoint, tables: InputTables | None
    ) -> Iterator[ExpertForecast | InputForecast]:
        """Yield those of an encoder's inputs, and of what is generated."""
        folder, of_decoder = folders_of(checkpoint.path, self.index.path)
        if isinstance(model, CausalLM):
            yield ExpertForecast(network_texts(folder, model, checkpoint), self.cache, _trial(WHOLE_PASS))
            return
        if tables is not None:
            yield InputForecast(tables, self.cache, _trial(f"{WHOLE_PASS} of inputs"))
        if is_saved(of_decoder):
            texts, first_layer = network_texts(of_decoder, model, checkpoint), model.config.num_encoder_moe_layers
            yield ExpertForecast(texts, self.cache, _trial(WHOLE_PASS), first_layer=first_layer)

    def expect(self, request: Request) -> None:
        """Take note of a request that will be in some later pass."""
        for forecast in self._forecasts:
            if isinstance(forecast, InputForecast):
                forecast.expect(request)

    def begin_pass(self, batch: Batch) -> None:
        """Begin a pass. Blocks: while a network predicts what it needs."""
        self._pass_began_s, self._stall_s = perf_counter(), self.cache.stall_s
        self.cache.begin_pass()
        if self._prefetcher is not None:
            self._prefetcher.begin_pass()
            self._ask_network(self._prefetcher, batch)
        if not self._is_guessed:
            for forecast in self._forecasts:
                forecast.begin_pass(batch)
        if self.pool.remote is not None:
            self.pool.remote.begin_pass()

    def _ask_network(self, prefetcher: Prefetcher, batch: Batch) -> None:
        """Tell a predictor that weighs it what a network says of the pass, while guesses are followed."""
        if self._texts is None or not prefetcher.is_on:
            return
        if tokens := new_tokens(batch):
            self._texts.forget_finished()
            prefetcher.expect(batch.num_tokens, named_by_layer(self._texts.wanted(tokens)))

    def end_pass(self, num_tokens: int) -> None:
        """End a pass that went well."""
        seconds = perf_counter() - self._pass_began_s
        if self.pool.remote is not None:
            self.pool.remote.end_pass(seconds)
        if self.by_drafts is not None and self._is_guessed:
            self.by_drafts.end_pass(num_tokens)
        elif self._forecasts:
            for forecast in self._forecasts:
                forecast.end_pass(num_tokens, seconds)
        elif self._prefetcher is not None:
            self._prefetcher.end_pass(seconds, self.cache.stall_s - self._stall_s)

    @property
    def _is_guessed(self) -> bool:
        """Whether models that guess have said what the pass needs: they know more than who predicts."""
        return self.by_drafts is not None and self.by_drafts.is_asked

    def drop_pass(self) -> None:
        """End a pass that failed."""
        if self.by_drafts is not None:
            self.by_drafts.drop_pass()
        for forecast in self._forecasts:
            forecast.drop_pass()

    @property
    def stall_s(self) -> float:
        """How long passes have waited for experts, in seconds."""
        return self.cache.stall_s

    def stats(self) -> ExpertStats:
        """Return the counters as they are now."""
        now, remote = self.cache.stats(), self.pool.remote
        ahead = [one for one in (self._prefetcher, *self._forecasts, self.by_drafts) if one is not None]
        return ExpertStats(
            memory_limit_bytes=self._memory_bytes,
            expert_slots=self.cache.num_slots,
            experts_in_slots=self.cache.num_resident,
            experts_on_disk=self._spec.num_slabs,
            is_prefetching=any(one.is_on for one in ahead),
            trials=trial_stats([one.trial for one in ahead] + ([] if remote is None else remote.trials)),
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
        """End the reading threads. Blocks: until the reads that have begun are done."""
        with ExitStack() as closing:  # from the last to the first
            closing.callback(self._reader.close)
            closing.callback(self._disk.close)
            closing.callback(self.cache.drain)
            for forecast in self._forecasts:
                closing.callback(forecast.close)
            if self.pool.remote is not None:
                closing.callback(self.pool.remote.close)


def _trial(source: str, *, starts_on: bool = False) -> Trial:
    return Trial(f"prefetching by {source}", starts_on=starts_on)


def network_texts(folder: Path, model: LanguageModel, checkpoint: Checkpoint) -> FollowedTexts:
    """Return whom to ask about a model's passes. Raises: CheckpointError if the network is not there, or another's."""
    return FollowedTexts(for_serving(load_predictor(folder, checkpoint)), model.embed)


def remote_stats(remote: RemoteExperts) -> dict[str, Any]:
    """Return what of the statistics is about experts that lenders have."""
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
    """Return the memory of slots as kernels see it in each layer with experts; if that is the same in all, once."""
    made: dict[tuple[str, str], PackedExperts] = {}
    formats_of_layers = spec.expert_formats or ((spec.weight_format, spec.weight_format),)
    for formats in formats_of_layers:
        if formats not in made:
            up, down = (cast(WeightFormat, name) for name in formats)
            made[formats] = PackedExperts(
                arena.num_slots,
                shape.hidden_size,
                shape.intermediate_size,
                up,
                down_format=down,
                kind=expert_kind(shape),
                is_wide=is_wide,
                storage=arena.slots,
            )
    return [made[formats] for formats in formats_of_layers]


def traced_on(row: Row, slab_bytes: int) -> Spanned:
    """Return a caller of functions that records on a row how long they took, and what they read of experts."""

    def spanned(name: str, layer: int, function: Callable[..., T], /, *args: Any) -> T:
        start_ns = perf_counter_ns()
        try:
            return function(*args)
        finally:
            num_bytes = len(args[0]) * slab_bytes if name == EXPERTS else 0
            label = Label(name, layer, num_bytes=num_bytes)
            row.record(label, start_ns, perf_counter_ns(), is_blocked=name == WAITS)

    return spanned
