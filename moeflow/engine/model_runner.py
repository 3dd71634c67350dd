"""Runs one pass on the model: token lists in, sampled tokens out.

Knows nothing of queues, of what happens between passes, and of how the model was loaded (`runner_loading.py`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
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
from moeflow.engine.ranks.ranks import Ranks
from moeflow.engine.sampler import PROMPT_CHUNK, SampledToken, prompt_logprobs, sample
from moeflow.kv.block_tables import BlockTables
from moeflow.kv.storage import KVStorage
from moeflow.models.layers.decoder import CausalLM
from moeflow.models.pass_input import PassInput
from moeflow.pipeline.runtime.dot import write_dot
from moeflow.pipeline.runtime.perfetto import write_perfetto
from moeflow.pipeline.runtime.trace import Label, Trace
from moeflow.pipeline.runtime.traced_tasks import tasks_of_last_pass
from moeflow.workload.routing_trace import RoutingRecorder

PASSES = "passes"  # a trace's row of whole passes


def make_kv_storage(config: EngineConfig, shape: ModelConfig) -> KVStorage:
    """Return the storage of keys and values that an engine's configuration asks for."""
    return KVStorage(
        num_layers=shape.num_layers,
        num_blocks=config.scheduler.num_blocks,
        block_size=config.scheduler.block_size,
        num_kv_heads=shape.num_kv_heads,
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
    ) -> None:
        """Take a model, where its experts come from unless all are in memory, and who takes down what happens.

        `ranks` are the processes that compute the same passes, each its part of the experts.
        """
        self._ranks = ranks
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
        hidden_states = self._forward(batch)
        sampling = [entry for entry in batch.entries if entry.samples]
        ends = _row_offsets(batch)
        sampled: Sequence[SampledToken] = ()
        if sampling:
            rows = [ends[entry.request] - 1 for entry in sampling]
            is_all = len(rows) == hidden_states.shape[0]
            ends_of_texts = hidden_states if is_all else hidden_states[torch.tensor(rows, device=self._device)]
            sampled = sample(self._model.logits(ends_of_texts), [entry.request for entry in sampling])
        return PassResult(
            dict(zip((entry.request for entry in sampling), sampled, strict=True)),
            {
                entry.request: self._prompt_logprobs(entry, hidden_states, ends[entry.request])
                for entry in batch.entries
                if entry.request.sampling.prompt_logprobs is not None and not entry.request.output_token_ids
            },
        )

    def _forward(self, batch: Batch) -> torch.Tensor:
        """Return the final hidden states [T, H] of all tokens, in the order of the entries."""
        given = PassInput.of(batch)
        with nullcontext() if self._ranks is None else self._ranks.all_computing(given):
            hidden_states: torch.Tensor = self._model(*given.tensors(self._kv, self._device))
        return hidden_states

    def _prompt_logprobs(self, entry: BatchEntry, hidden_states: torch.Tensor, end: int) -> list[TokenLogprobs]:
        """Return log-probabilities of the prompt tokens that follow those of this pass."""
        request = entry.request
        stop = min(entry.stop, len(request.prompt_token_ids) - 1)  # the last one predicts the output
        if stop <= entry.start:
            return []
        begin = end - entry.num_tokens
        found: list[TokenLogprobs] = []
        for start in range(entry.start, stop, PROMPT_CHUNK):  # logits of all positions would be many times the rest
            end_row = min(start + PROMPT_CHUNK, stop) - entry.start + begin
            logits = self._model.logits(hidden_states[begin + start - entry.start : end_row])
            targets = request.token_ids(start + 1, min(start + PROMPT_CHUNK, stop) + 1)
            found += prompt_logprobs(logits, targets, request.sampling.prompt_logprobs or 0)
        return found


def _row_offsets(batch: Batch) -> dict[Request, int]:
    """Map each request to one past its last row in the pass."""
    ends: dict[Request, int] = {}
    total = 0
    for entry in batch.entries:
        total += entry.num_tokens
        ends[entry.request] = total
    return ends
