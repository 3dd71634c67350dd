"""Runs one pass on the model: token lists in, sampled tokens out.

Knows nothing of queues, of what happens between passes, and of how the model was loaded (`runner_loading.py`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from moeflow.core.batch import Batch, BatchEntry
from moeflow.core.engine_config import EngineConfig
from moeflow.core.model_config import ModelConfig
from moeflow.core.request import Request
from moeflow.engine.expert_store import COMPUTING, ExpertStore
from moeflow.engine.memory_limiter import MemoryLimiter
from moeflow.engine.messages import ExpertStats, ModelInfo, TokenLogprobs
from moeflow.engine.offload.offloaded_model import OffloadedModel
from moeflow.engine.ranks.rank_upkeep import RankUpkeep
from moeflow.engine.ranks.ranks import Ranks
from moeflow.engine.sampler import SampledToken, prompt_logprobs, sample
from moeflow.kv.block_tables import BlockTables
from moeflow.kv.storage import KVStorage
from moeflow.models.layers.decoder import CausalLM
from moeflow.models.pass_input import PROMPT_CHUNK, PassInput, rows_of
from moeflow.parallel.blocks import num_kv_heads
from moeflow.pipeline.runtime.dot import write_dot
from moeflow.pipeline.runtime.perfetto import write_perfetto
from moeflow.pipeline.runtime.trace import Label, Trace
from moeflow.pipeline.runtime.traced_tasks import tasks_of_last_pass
from moeflow.workload.routing_trace import RoutingRecorder

PASSES = "passes"  # a trace's row of whole passes


def make_kv_storage(config: EngineConfig, shape: ModelConfig, rank: int = 0) -> KVStorage:
    """Return the storage of keys and values that an engine's configuration asks for, of the heads that a rank has."""
    return KVStorage(
        num_layers=shape.num_layers,
        num_blocks=config.scheduler.num_blocks,
        block_size=config.scheduler.block_size,
        num_kv_heads=num_kv_heads(shape, config.parallel, rank),
        head_dim=shape.head_dim,
        dtype=getattr(torch, config.kv_dtype),
        device=torch.device(config.device),
        gives_back=config.experts is not None,
    )


@dataclass(frozen=True, slots=True)
class PassResult:
    """What a pass brought, by request."""

    sampled: dict[Request, SampledToken]  # of every entry that samples
    prompt_logprobs: dict[Request, list[TokenLogprobs]]  # of the prompt tokens after those of this pass


class Runner(Protocol):
    """Whatever computes passes: the model, or a stand-in in tests."""

    @property
    def info(self) -> ModelInfo:
        """What is being run."""

    def run(self, batch: Batch) -> PassResult:
        """Compute a pass. May raise anything; the engine then fails the requests of this batch alone."""

    def settle(self, blocks: BlockTables) -> None:
        """Between passes: give back the memory of blocks that are not needed, and limit those that may be used."""

    def expert_stats(self) -> ExpertStats:
        """Return what became of experts that come from disk so far."""

    def close(self) -> None:
        """Close threads and files."""


class ModelRunner:
    """A loaded model with its KV cache."""

    def __init__(
        self,
        model: CausalLM | OffloadedModel,
        config: EngineConfig,
        info: ModelInfo,
        experts: ExpertStore | None = None,
        recorder: RoutingRecorder | None = None,
        trace: Trace | None = None,
        ranks: Ranks | None = None,
        upkeep: RankUpkeep | None = None,
    ) -> None:
        """Take a model, where its experts come from unless all are in memory, and who takes down what happens.

        `ranks` are the processes that compute the same passes, each its part; `upkeep` is for between passes.
        """
        self._ranks, self._upkeep = ranks, upkeep
        self.info = info
        self._model = model
        self._experts = experts
        self._recorder = recorder
        self._trace, self._trace_file, self._graph_file = trace, config.trace_file, config.graph_file
        self._row = None if trace is None else trace.row(PASSES)
        self._no_expert_stats = ExpertStats(memory_limit_bytes=config.memory_bytes)
        self._device = torch.device(config.device)
        shape = model.config
        self._kv = make_kv_storage(config, shape)
        self._keeper: MemoryLimiter | None = None
        if experts is not None and config.experts is not None and config.memory is not None:
            self._keeper = MemoryLimiter(
                config.memory, shape, config.scheduler, config.experts, experts.slots, self._kv
            )

    @property
    def trace(self) -> Trace | None:
        """What has been taken down so far; None: nothing is."""
        return self._trace

    def expert_stats(self) -> ExpertStats:
        """Return what became of experts that come from disk so far."""
        if self._upkeep is not None:
            return self._upkeep.add_stats(self._no_expert_stats)
        return self._no_expert_stats if self._experts is None else self._experts.stats()

    def close(self) -> None:
        """End what reads experts and what records; the model cannot be run any more.

        Raises: OSError from the trace or the graph.
        """
        if self._experts is not None:
            self._experts.close()
        if self._ranks is not None:
            self._ranks.close()
        if isinstance(self._model, OffloadedModel):
            self._model.close()
        if self._recorder is not None:
            self._recorder.close()
        if self._trace is not None:
            trace, self._trace = self._trace, None
            if self._graph_file:
                write_dot(tasks_of_last_pass(trace, PASSES, COMPUTING), Path(self._graph_file))
            if self._trace_file:
                write_perfetto(trace, Path(self._trace_file))

    @torch.inference_mode()
    def run(self, batch: Batch) -> PassResult:
        """Compute all tokens of the batch and sample where an entry asks for it.

        Raises: StorageError if an expert that it needs cannot be read, CapacityError if memory is too short.
        """
        if self._keeper is not None:
            self._keeper.make_room(batch)
        with self._noted(batch):
            return self._run(batch)

    def settle(self, blocks: BlockTables) -> None:
        """See `Runner.settle`."""
        if self._keeper is not None:
            self._keeper.settle(blocks)

    @contextmanager
    def _noted(self, batch: Batch) -> Iterator[None]:
        """Report the beginning and end of a pass to trace, recorder and expert store."""
        if self._experts is not None:
            self._experts.begin_pass()
        start_ns, stall_s = time.perf_counter_ns(), self._stall_s()
        try:
            yield
        except BaseException:
            if self._recorder is not None:
                self._recorder.drop_pass()
            raise
        end_ns = time.perf_counter_ns()
        if self._experts is not None:
            self._experts.end_pass()
        if self._row is not None:
            # Without attention's, which grow with contexts.
            flops = 2 * self.info.num_active_parameters * batch.num_tokens
            self._row.record(Label(f"pass of {batch.num_tokens} tokens", flops=flops), start_ns, end_ns)
        if self._recorder is not None:
            compute_s = (end_ns - start_ns) / 1e9 - (self._stall_s() - stall_s)
            num_generated = sum(entry.samples for entry in batch.entries)
            self._recorder.end_pass(num_generated=num_generated, compute_s=compute_s)

    def _stall_s(self) -> float:
        return 0.0 if self._experts is None else self._experts.stall_s

    def _run(self, batch: Batch) -> PassResult:
        given = PassInput.of(batch)
        with nullcontext() if self._ranks is None else self._ranks.all_computing(given):
            hidden = self._model(*given.tensors(self._kv, self._device))
            # One after another, as they are asked for: those of a whole prompt would be many times the rest.
            logits = (self._model.logits(rows_of(hidden, rows)) for rows in given.logit_rows)
            requests = [entry.request for entry in batch.entries if entry.samples]
            sampled = sample(next(logits), requests) if requests else []
            result = PassResult(
                dict(zip(requests, sampled, strict=True)),
                {
                    entry.request: _prompt_logprobs(entry, logits)
                    for entry in batch.entries
                    if entry.request.sampling.prompt_logprobs is not None and not entry.request.output_token_ids
                },
            )
            if self._upkeep is not None:
                self._upkeep.end_pass()
            return result


def _prompt_logprobs(entry: BatchEntry, logits: Iterator[torch.Tensor]) -> list[TokenLogprobs]:
    """Return log-probabilities of the prompt tokens that follow those of this pass, from their next logits."""
    request, stop = entry.request, entry.start + entry.num_scored
    found: list[TokenLogprobs] = []
    for start in range(entry.start, stop, PROMPT_CHUNK):
        targets = request.token_ids(start + 1, min(start + PROMPT_CHUNK, stop) + 1)
        found += prompt_logprobs(next(logits), targets, request.sampling.prompt_logprobs or 0)
    return found
