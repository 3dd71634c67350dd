"""Runs one pass on the model: token lists in, sampled tokens out. The only file of the engine with tensors.

Knows nothing of queues and of what happens between passes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import torch

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.checkpoint.identity import checkpoint_identity
from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.batch import Batch, BatchEntry
from moeflow.core.engine_config import EngineConfig
from moeflow.core.model_config import ConfigReader, ModelConfig
from moeflow.core.request import Request
from moeflow.engine.expert_store import ExpertStore
from moeflow.engine.memory_keeper import MemoryKeeper
from moeflow.engine.messages import ExpertStats, ModelInfo, TokenLogprobs
from moeflow.engine.offload_plan import OFFLOADING
from moeflow.engine.offloaded_model import OffloadedModel
from moeflow.engine.process_memory import PROCESS_BYTES
from moeflow.engine.sampler import PROMPT_CHUNK, SampledToken, prompt_logprobs, sample
from moeflow.engine.slab_files import formats_of, map_packed
from moeflow.kernels import cpu
from moeflow.kernels.attention_metadata import AttentionMetadata
from moeflow.kernels.packed_weights import expert_bytes
from moeflow.kernels.weight_format import WeightFormat
from moeflow.kvcache.block_tables import BlockTables
from moeflow.layers.context import ForwardContext
from moeflow.layers.decoder import CausalLM
from moeflow.layers.moe import MoE
from moeflow.layers.placement import Placement
from moeflow.memory.kv_storage import KVStorage
from moeflow.memory.resident_reader import read_resident
from moeflow.memory.weight_memory import FreshMemory, WeightMemory
from moeflow.models.loading import load_model
from moeflow.models.registry import read_model_config
from moeflow.pipeline.streaming import streaming
from moeflow.pipeline.task import Task, TaskMaker
from moeflow.runtime.dot import write_dot
from moeflow.runtime.perfetto import write_perfetto
from moeflow.runtime.trace import Label, Trace
from moeflow.workload.routing_trace import RoutingRecorder, TraceHeader

COPY_THREADS = 4  # that move weights between two places of main memory: about as many as it takes to keep it busy
DRAWN_MICRO_BATCHES = 4  # of a pipeline's graph, where each pass has as many as it needs


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
        ...

    def run(self, batch: Batch) -> PassResult:
        """Compute a pass. May raise anything; the engine then fails the requests of this batch alone."""
        ...

    def settle(self, blocks: BlockTables) -> None:
        """Between passes: give back the memory of blocks that are not needed, and limit those that may be used."""
        ...

    def expert_stats(self) -> ExpertStats:
        """Return what became of experts that come from disk so far."""
        ...

    def close(self) -> None:
        """Let go of threads and files."""
        ...


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
    ) -> None:
        """Take a model, where its experts come from unless all are in memory, and who takes down what happens."""
        self.info = info
        self._model = model
        self._experts = experts
        self._recorder = recorder
        self._trace, self._trace_file = trace, Path(config.trace_file)
        self._row = None if trace is None else trace.row("passes")
        self._no_expert_stats = ExpertStats(memory_limit_bytes=config.memory_bytes)
        self._device = torch.device(config.device)
        self._block_size = config.scheduler.block_size
        shape = model.config
        self._kv = KVStorage(
            num_layers=shape.num_layers,
            num_blocks=config.scheduler.num_blocks,
            block_size=self._block_size,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=getattr(torch, config.kv_dtype),
            device=self._device,
            gives_back=experts is not None,
        )
        self._keeper: MemoryKeeper | None = None
        if experts is not None and config.experts is not None and config.memory is not None:
            self._keeper = MemoryKeeper(config.memory, shape, config.scheduler, config.experts, experts.slots, self._kv)

    @classmethod
    def load(cls, config: EngineConfig, progress: Callable[[int, int], None] | None = None) -> ModelRunner:
        """Load the checkpoint that `config` names. Raises: CheckpointError, CapacityError, ConfigError."""
        set_up(config)
        with closing(open_checkpoint(config.model_path)) as checkpoint, ExitStack() as on_failure:
            experts = recorder = None
            trace = Trace() if config.trace_file else None
            if config.record_routing:
                recorder = RoutingRecorder(Path(config.record_routing), _trace_header(checkpoint, config))
                on_failure.callback(recorder.close)
            if config.experts is not None:
                experts = ExpertStore.open(checkpoint, config, on_bytes=progress, trace=trace)
                on_failure.callback(experts.close)
            memory = _weight_memory(checkpoint, config, experts, progress)
            place = placement(config, memory, experts, recorder)
            model = load_model(checkpoint, place, num_threads=config.num_threads, progress=progress)
            if experts is not None:
                experts.predict_for(model)
            if config.graph_file:
                write_dot(_tasks(model, config), Path(config.graph_file))
            served: CausalLM | OffloadedModel = model
            if config.offload is not None:
                served = OffloadedModel(model, config, trace)
                on_failure.callback(served.close)
            runner = cls(served, config, _describe(model.config, checkpoint, config), experts, recorder, trace)
            on_failure.pop_all()
            return runner

    def expert_stats(self) -> ExpertStats:
        """Return what became of experts that come from disk so far."""
        return self._no_expert_stats if self._experts is None else self._experts.stats()

    def close(self) -> None:
        """End what reads experts and what records; the model cannot be run any more. Raises: OSError from the trace."""
        if self._experts is not None:
            self._experts.close()
        if isinstance(self._model, OffloadedModel):
            self._model.close()
        if self._recorder is not None:
            self._recorder.close()
        if self._trace is not None:
            write_perfetto(self._trace, self._trace_file)
            self._trace = None

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
        """Tell those who watch passes that one begins, and how it ends."""
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
            flops = (
                2 * self.info.num_active_parameters * batch.num_tokens
            )  # without attention's, which grow with contexts
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
        token_ids = [t for entry in batch.entries for t in entry.request.token_ids(entry.start, entry.stop)]
        positions = [p for entry in batch.entries for p in range(entry.start, entry.stop)]
        metadata = AttentionMetadata.build(
            starts=[entry.start for entry in batch.entries],
            num_tokens=[entry.num_tokens for entry in batch.entries],
            block_ids=[entry.block_ids for entry in batch.entries],
            block_size=self._block_size,
            device=self._device,
        )
        context = ForwardContext(torch.tensor(positions, device=self._device), metadata, self._kv)
        hidden_states: torch.Tensor = self._model(torch.tensor(token_ids, device=self._device), context)
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


def set_up(config: EngineConfig) -> None:
    """Have this process compute as is configured: threads, instruction set, limit of a GPU's memory."""
    _set_up_threads(config)
    _limit_device(config)


def _set_up_threads(config: EngineConfig) -> None:
    """Give the cores to the kernels, or to torch: threads of both at once would take them from each other.

    Beside a device that computes in torch, the kernels attend while torch copies weights, for which a few threads do.
    """
    if config.cpu_isa:
        cpu.use_isa(config.cpu_isa)
        cpu.set_num_threads(config.num_threads)
    elif config.offload is not None and cpu.is_available():
        cpu.set_num_threads(config.num_threads)
    num_threads = config.num_threads
    if config.offload is not None and config.offload.cuda is not None:
        num_threads = min(num_threads, COPY_THREADS)
    torch.set_num_threads(1 if config.cpu_isa else num_threads)


def _limit_device(config: EngineConfig) -> None:
    """Have torch refuse what goes beyond the limit; PROCESS_BYTES of it are for what CUDA itself takes."""
    if config.device_memory_bytes:
        device = _device_of_layers(config)
        total_bytes = torch.cuda.get_device_properties(device).total_memory
        share = max(config.device_memory_bytes - PROCESS_BYTES, 0) / total_bytes
        torch.cuda.set_per_process_memory_fraction(share, device)


def _device_of_layers(config: EngineConfig) -> torch.device:
    return torch.device(config.device if config.offload is None else config.offload.torch_device)


def _weight_memory(
    checkpoint: Checkpoint,
    config: EngineConfig,
    experts: ExpertStore | None,
    progress: Callable[[int, int], None] | None,
) -> WeightMemory:
    """Return the memory of the weights, filled if they have been packed before."""
    if experts is not None:
        return read_resident(experts.index)
    return map_packed(checkpoint, config, progress) if config.packed_file else FreshMemory()


def placement(
    config: EngineConfig,
    memory: WeightMemory,
    experts: ExpertStore | None = None,
    recorder: RoutingRecorder | None = None,
) -> Placement:
    """Return where the layers' weights go, and in which form."""
    return Placement(
        getattr(torch, config.dtype),
        _device_of_layers(config),
        formats_of(config) if config.cpu_isa else None,
        memory,
        has_slabs=config.offload is not None and not config.cpu_isa,
        pool=None if experts is None else experts.pool,
        on_route=None if recorder is None else lambda topk_ids: recorder.add_layer(topk_ids.cpu().numpy()),
    )


def _trace_header(checkpoint: Checkpoint, config: EngineConfig) -> TraceHeader:
    shape = read_model_config(checkpoint)
    expert_shape = (shape.hidden_size, shape.intermediate_size)
    return TraceHeader(
        identity=checkpoint_identity(checkpoint),
        num_layers=shape.num_layers - len(shape.dense_layers),
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        slab_bytes=expert_bytes(*expert_shape, cast(WeightFormat, config.weight_format)) if config.cpu_isa else 0,
    )


def _tasks(model: CausalLM, config: EngineConfig) -> Iterator[Task]:
    """Yield the tasks of a pass; one in which nothing can overlap is a single task."""
    if config.offload is not None:
        return OFFLOADING[config.offload.pipeline].make_tasks(len(model.layers), DRAWN_MICRO_BATCHES)
    if config.experts is None:
        return iter([TaskMaker()("forward")])
    return streaming([isinstance(layer.mlp, MoE) for layer in model.layers])


def _row_offsets(batch: Batch) -> dict[Request, int]:
    """Map each request to one past its last row in the pass."""
    ends: dict[Request, int] = {}
    total = 0
    for entry in batch.entries:
        total += entry.num_tokens
        ends[entry.request] = total
    return ends


def _describe(shape: ModelConfig, checkpoint: Checkpoint, config: EngineConfig) -> ModelInfo:
    return ModelInfo(
        name=config.model_name,
        path=config.model_path,
        model_type=shape.model_type,
        vocab_size=shape.vocab_size,
        max_model_len=config.scheduler.max_model_len,
        max_running=config.scheduler.max_running,
        eos_token_ids=_eos_token_ids(checkpoint),
        num_layers=shape.num_layers,
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        num_parameters=shape.num_parameters,
        num_active_parameters=shape.num_active_parameters,
        weight_format=config.weight_format,
        device=str(_device_of_layers(config)),
        kv_capacity_tokens=config.scheduler.num_blocks * config.scheduler.block_size,
        created=int(time.time()),
    )


def _eos_token_ids(checkpoint: Checkpoint) -> tuple[int, ...]:
    """Return what ends a text: `generation_config.json` knows better than `config.json`, which may say null."""
    for source in (checkpoint.generation_config, checkpoint.config):
        value = source.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token_id, int) and token_id >= 0 for token_id in ids):
            raise ConfigReader(source, checkpoint.config_file).error(f"'eos_token_id' is {value!r}, no token id")
        if ids:
            return tuple(ids)
    return ()
