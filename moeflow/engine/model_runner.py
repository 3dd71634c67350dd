"""Runs one pass on the model: token lists in, sampled tokens out.

Knows nothing of queues, of what happens between passes, and of how the model was loaded (`runner_loading.py`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, cast

import msgspec

from moeflow.core.batch import Batch, BatchEntry
from moeflow.core.engine_config import EngineConfig
from moeflow.core.engine_messages import ExpertStats, ModelInfo, TokenLogprobs
from moeflow.core.errors import GroupError
from moeflow.core.request import Request
from moeflow.engine.forward import make_forward, make_kv_storage
from moeflow.engine.masked_sampling import PASS_WAIT_S, MaskedSampling
from moeflow.engine.verification import Verified
from moeflow.kernels.arrays import Array
from moeflow.kernels.on_demand import on_demand, without_gradients
from moeflow.kv.block_tables import BlockTables
from moeflow.kv.storage import KVStorage
from moeflow.models.pass_input import PROMPT_CHUNK, PassInput
from moeflow.pipeline.runtime.trace import SAMPLING, Label, Trace, working

if TYPE_CHECKING:
    from moeflow.engine import expert_store, hybrid_store
    from moeflow.engine.lossy_routing import LossyRouting
    from moeflow.engine.observing.observed_model import ObservedModel
    from moeflow.engine.offload import offloaded_model
    from moeflow.engine.ranks.rank_upkeep import RankUpkeep
    from moeflow.engine.ranks.ranks import Ranks
    from moeflow.engine.routing_record import RoutingRecord
    from moeflow.kernels.capacity import ExpertCapacity
    from moeflow.models.language_model import LanguageModel
    from moeflow.pipeline.runtime.recording import Recording

with on_demand(__name__):
    from moeflow.engine import logprobs, memory_limiter, pass_memory, pass_tracing
    from moeflow.engine.observing import observed_model, residency
    from moeflow.engine.ranks import rank_spans
    from moeflow.models.layers import encoder_decoder
    from moeflow.pipeline.runtime import dot, perfetto, traced_tasks

_LOGITS, _SAMPLING = Label("logits"), Label("sampling")


class PassResult(msgspec.Struct, frozen=True):
    """What a pass brought, by request."""

    sampled: dict[Request, Verified]  # of entries that sample, but for those whose masks come later
    prompt_logprobs: dict[Request, list[TokenLogprobs]]  # of the prompt tokens after those of this pass
    pooled: dict[Request, Array] = {}  # hidden states [n, H] that become a vector


class Closable(Protocol):
    """An object with threads or files."""

    def close(self) -> None:
        """End threads, close files."""


class PassExperts(Protocol):
    """The experts of passes that do not find all of them in one place."""

    @property
    def stall_s(self) -> float:
        """Seconds that passes have waited for a disk."""

    def expect(self, request: Request) -> None:
        """Receive a request of a later pass."""

    def begin_pass(self, batch: Batch) -> None:
        """Begin a pass."""

    def end_pass(self, num_tokens: int) -> None:
        """End a pass without an error."""

    def drop_pass(self) -> None:
        """End a failed pass."""

    def stats(self) -> ExpertStats:
        """Return the counters as they are now."""

    def close(self) -> None:
        """End threads, and give memory back."""


class Runner(Protocol):
    """Whatever computes passes: the model, or a stand-in in tests."""

    @property
    def info(self) -> ModelInfo:
        """The running model."""

    def expect(self, request: Request) -> None:
        """Take note of a request that will be in some later pass, to prepare for it."""

    def run(self, batch: Batch) -> PassResult:
        """Compute a pass. May raise anything; the engine then fails the requests of this batch alone."""

    def take_late(self, wait_s: float) -> list[tuple[BatchEntry, Verified]]:
        """Return what entries of earlier passes bring only now; waits for a first one, if any is to come."""

    def classify(self, vector: Sequence[float]) -> list[float]:
        """Return the probabilities of the model's classes, which it has, for the vector of a prompt."""

    def settle(self, blocks: BlockTables) -> None:
        """Between passes: return the memory of unneeded blocks, and limit usable ones."""

    def check_ranks(self) -> None:
        """Look whether all processes that have a part of the model are there, while none computes.

        Raises: GroupError if one is gone.
        """

    def expert_stats(self) -> ExpertStats:
        """Return what became of experts that come from disk so far."""

    def observed(self) -> ObservedModel:
        """Return the model as an observer of its passes sees it. Its routers report nothing until that opens a tap."""

    def close(self) -> None:
        """Close threads and files."""


class OtherProcesses(msgspec.Struct, frozen=True):
    """The other ranks of this model, if there are any."""

    ranks: Ranks | None = None  # compute the same passes, each its part
    upkeep: RankUpkeep | None = None  # of these, between passes


ALONE: Final = OtherProcesses()


class LossyExperts(msgspec.Struct, frozen=True):
    """Choices of experts that change answers, where the user asked for that."""

    routing: LossyRouting | None = None  # in the place of routers
    capacity: ExpertCapacity | None = None  # beyond it choices are dropped


EXACT: Final = LossyExperts()


class ModelRunner:
    """A loaded model with its KV cache."""

    def __init__(
        self,
        model: LanguageModel | offloaded_model.OffloadedModel,
        config: EngineConfig,
        info: ModelInfo,
        experts: PassExperts | None = None,
        recorder: RoutingRecord | None = None,
        trace: Trace | None = None,
        others: OtherProcesses = ALONE,
        lossy: LossyExperts = EXACT,
    ) -> None:
        """Take a model, where its experts come from unless all are in memory, and who takes down what happens."""
        self._ranks, self._upkeep = others.ranks, others.upkeep
        self.info = info
        self._model, self._config = model, config
        self._experts, self._lossy, self._capacity = experts, lossy.routing, lossy.capacity
        comes_from_disk = config.experts is not None and config.hybrid is None
        self._store = cast("expert_store.ExpertStore | None", experts if comes_from_disk else None)
        hybrid = cast("hybrid_store.HybridStore | None", experts if config.hybrid is not None else None)
        self._hybrid = hybrid
        self._recorder = recorder
        self._closed_too: list[Closable] = []
        self._trace = trace or Trace(is_on=False)
        self._sampling_row = self._trace.row(SAMPLING)
        self._tracing: pass_tracing.PassTracing | None = None  # from the first time on that somebody looks
        self._trace_file, self._graph_file = config.trace_file, config.graph_file
        if self._trace.is_on:
            self._tracing = self._make_tracing(keeps_all=True)
        self._no_expert_stats = ExpertStats(memory_limit_bytes=config.memory_bytes)
        shape = model.config
        self._kv = make_kv_storage(config, shape)
        self._forward = make_forward(config, model, self._kv, self._upkeep, None if hybrid is None else hybrid.pool)
        is_continuous = config.scheduler.policy == "continuous"  # others have all requests in every pass
        self._sampling = MaskedSampling(PASS_WAIT_S if is_continuous else None)
        self._num_generated = 0  # tokens, by the last pass
        self._kv_moves: list[tuple[int, int]] = []  # after the last pass, which other ranks make before the next
        self._keeper: memory_limiter.MemoryLimiter | None = None
        if self._store is not None and config.experts is not None and config.memory is not None:
            self._keeper = memory_limiter.MemoryLimiter(
                config.memory, shape, config.scheduler, config.experts, self._store.slots, self._kv
            )

    def check_ranks(self) -> None:
        """See `Runner.check_ranks`."""
        if self._ranks is not None:
            self._ranks.check()

    @property
    def model(self) -> LanguageModel | offloaded_model.OffloadedModel:
        """The model that passes are computed with."""
        return self._model

    @property
    def kv(self) -> KVStorage:
        """Keys and values of past tokens."""
        return self._kv

    def make_room(self, blocks: Iterable[int]) -> None:
        """Free memory for KV blocks that are written outside of passes. Raises: CapacityError if that cannot be."""
        if self._keeper is not None:
            self._keeper.make_room_for(blocks)

    @property
    def experts(self) -> expert_store.ExpertStore | None:
        """Where experts come from; None: all are in memory."""
        return self._store

    def recording(self, num_passes: int) -> Recording:
        """See `RecordsSpans`."""
        if self._tracing is None:
            self._tracing = self._make_tracing()
        self._tracing.switch(is_on=True)
        recording = self._tracing.recording(num_passes)
        if self._ranks is None:
            return recording
        self._ranks.tell(rank_spans.SpansAsked(num_passes))
        return msgspec.structs.replace(recording, ranks=rank_spans.gather_recordings(self._ranks.group, None))

    def end_recording(self) -> None:
        """See `RecordsSpans`."""
        if self._tracing is None or not self._tracing.is_on:
            return
        self._tracing.switch(is_on=False)
        if self._ranks is not None:
            with suppress(GroupError):  # the next pass reports it
                self._ranks.tell(rank_spans.SpansAsked(0))

    def _make_tracing(self, *, keeps_all: bool = False) -> pass_tracing.PassTracing:
        waits = None if self._upkeep is None else self._upkeep.group.clock
        return pass_tracing.PassTracing(self._trace, self._model, self._model.config, waits, keeps_all=keeps_all)

    def expert_stats(self) -> ExpertStats:
        """Return statistics of experts so far."""
        stats = self._no_expert_stats if self._experts is None else self._experts.stats()
        if self._upkeep is not None and self._ranks is not None:
            stats = self._upkeep.add_stats(stats, self._ranks.hosts)
        if self._capacity is None:
            return stats
        return msgspec.structs.replace(
            stats, expert_choices_total=self._capacity.num_choices, dropped_choices_total=self._capacity.num_dropped
        )

    def observed(self) -> ObservedModel:
        """See `Runner.observed`."""
        disk = self._store if self._hybrid is None else self._hybrid.disk
        places = residency.Residency(
            self._config,
            disk=disk,
            hybrid=None if self._hybrid is None else self._hybrid.pool,
            ranks=None if self._ranks is None or self._upkeep is None else (self._ranks, self._upkeep),
        )
        return observed_model.observed_model(
            self._model, self._forward, self._config, places, disk, self._waited_s, self
        )

    def _waited_s(self) -> float:
        """Return how long passes have waited for other ranks, the mean of ranks, or for a GPU."""
        if self._ranks is None and self._hybrid is None:
            return 0.0
        stats = self.expert_stats()
        return stats.cpu_wait_s_total + sum(it.waited_s_total for it in stats.ranks) / max(len(stats.ranks), 1)

    def close_too(self, part: Closable) -> None:
        """Have `close` end this, too."""
        self._closed_too.append(part)

    def close(self) -> None:
        """End what reads experts and what records, all of it even if some cannot be ended; the model cannot be run any
        more.

        Raises: OSError from the trace or the graph.
        """
        with ExitStack() as closing:  # from the last to the first
            closing.callback(self._write_trace)
            for part in self._parts():
                closing.callback(part.close)
            closing.callback(self._sampling.close)
            closing.callback(self._forward.close)

    def _parts(self) -> Iterator[Closable]:
        yield self._model
        yield from self._closed_too
        others = (self._recorder, self._ranks, self._lossy, self._experts)
        yield from filter(None, others)

    def _write_trace(self) -> None:
        graph_file, trace_file, self._graph_file, self._trace_file = self._graph_file, self._trace_file, "", ""
        if graph_file:
            dot.write_dot(
                traced_tasks.tasks_of_last_pass(self._trace, pass_tracing.PASSES, pass_tracing.COMPUTING),
                Path(graph_file),
            )
        if trace_file:
            perfetto.write_perfetto(self._trace, Path(trace_file))

    def expect(self, request: Request) -> None:
        """See `Runner.expect`."""
        if self._experts is not None:
            self._experts.expect(request)
        if self._lossy is not None:
            self._lossy.expect(request)

    @without_gradients
    def run(self, batch: Batch) -> PassResult:
        """Compute all tokens of the batch and sample where an entry asks for it.

        Raises: StorageError if an expert that it needs cannot be read, CapacityError if memory is too short.
        """
        try:
            with self._noted(batch):
                result = self._run(batch)
                self._num_generated = sum(len(one.tokens) for one in result.sampled.values())
                return result
        except (MemoryError, RuntimeError) as error:
            pass_memory.explain(error, self._config, batch.num_tokens)
            raise

    def take_late(self, wait_s: float) -> list[tuple[BatchEntry, Verified]]:
        """See `Runner.take_late`."""
        return self._sampling.take_late(wait_s)

    def classify(self, vector: Sequence[float]) -> list[float]:
        """See `Runner.classify`."""
        assert isinstance(self._model, encoder_decoder.EncoderDecoderLM), "decoders have no classes"
        assert self._model.classifier is not None, "there are no classes"
        return self._model.classifier(vector)

    def settle(self, blocks: BlockTables) -> None:
        """See `Runner.settle`."""
        if self._keeper is not None:
            self._keeper.settle(blocks)

    @contextmanager
    def _noted(self, batch: Batch) -> Iterator[None]:
        """Report the beginning and end of a pass to trace, recorder and expert store.

        A pass that cannot begin has failed, too: drafts may have announced it to the expert store.
        """
        try:
            self._begin_pass(batch)
            start_ns, stall_s = time.perf_counter_ns(), self._stall_s()
            yield
        except BaseException:
            if self._recorder is not None:
                self._recorder.drop_pass()
            if self._experts is not None:
                self._experts.drop_pass()
            raise
        end_ns = time.perf_counter_ns()
        if self._experts is not None:
            self._experts.end_pass(batch.num_tokens)
        if self._tracing is not None and self._tracing.is_on:
            self._tracing.end_pass(batch, start_ns, end_ns)
        if self._recorder is not None:
            compute_s = (end_ns - start_ns) / 1e9 - (self._stall_s() - stall_s)
            self._recorder.end_pass(num_generated=self._num_generated, compute_s=compute_s)

    def _begin_pass(self, batch: Batch) -> None:
        if self._keeper is not None:
            self._keeper.make_room(batch)
        if self._experts is not None:
            self._experts.begin_pass(batch)
        if self._lossy is not None:
            self._lossy.begin_pass(batch)
        if self._recorder is not None:
            self._recorder.begin_pass(batch)

    def _stall_s(self) -> float:
        return 0.0 if self._experts is None else self._experts.stall_s

    def _run(self, batch: Batch) -> PassResult:
        given = PassInput.of(batch, self._forward.num_micro_batches(batch.num_tokens), self._kv_moves)
        sampling = [entry for entry in batch.entries if entry.samples]
        self._sampling.begin(sampling)
        with self._with_ranks(given):
            # One after another, as they are asked for: those of a whole prompt would be many times the rest.
            found = self._forward.run(given)
            logits = (self._logits(hidden) for hidden in islice(found, len(given.logit_rows)))
            sampled = self._sample(next(logits), sampling) if sampling else {}
            self._keep(sampling, sampled)
            return PassResult(
                sampled,
                {
                    entry.request: _prompt_logprobs(entry, logits)
                    for entry in batch.entries
                    if entry.request.sampling.prompt_logprobs is not None and not entry.request.output_token_ids
                },
                {entry.request: next(found) for entry in batch.entries if entry.pooled},
            )

    def _logits(self, hidden: Array) -> Array:
        with working(self._sampling_row, _LOGITS):
            return self._model.logits(hidden)

    def _sample(self, logits: Array, entries: Sequence[BatchEntry]) -> dict[Request, Verified]:
        with working(self._sampling_row, _SAMPLING):
            return self._sampling.sample(logits, entries)

    @contextmanager
    def _with_ranks(self, given: PassInput) -> Iterator[None]:
        """Have other ranks compute the pass that is computed in the block, if there are some."""
        if self._ranks is None or self._upkeep is None:
            yield
            return
        with self._ranks.all_computing(given), self._upkeep.computing():
            yield

    def _keep(self, entries: Sequence[BatchEntry], sampled: Mapping[Request, Verified]) -> None:
        """Move keys and values of drafted tokens that are kept to where the next pass looks for them."""
        self._kv_moves = [
            (
                _slot(entry, entry.stop + node, self._kv.block_size),
                _slot(entry, entry.stop + place, self._kv.block_size),
            )
            for entry in entries
            if entry.request in sampled
            for place, node in enumerate(sampled[entry.request].kept)
            if node != place
        ]
        self._kv.move(self._kv_moves)


def _slot(entry: BatchEntry, position: int, block_size: int) -> int:
    return entry.block_ids[position // block_size] * block_size + position % block_size


def _prompt_logprobs(entry: BatchEntry, logits: Iterator[Array]) -> list[TokenLogprobs]:
    """Return log-probabilities of the prompt tokens that follow those of this pass, from their next logits."""
    request, stop = entry.request, entry.start + entry.num_scored
    found: list[TokenLogprobs] = []
    for start in range(entry.start, stop, PROMPT_CHUNK):
        targets = request.token_ids(start + 1, min(start + PROMPT_CHUNK, stop) + 1)
        found += logprobs.prompt_logprobs(next(logits), targets, request.sampling.prompt_logprobs or 0)
    return found
