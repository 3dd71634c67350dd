"""What the engine runs with: every number decided, nothing left on "auto".

Settings (what the user set) become this once, before anything loads; see `planner/resolve.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import msgspec

from moeflow.core.errors import CapacityError
from moeflow.core.hybrid_config import HybridConfig
from moeflow.core.offload_config import OffloadConfig
from moeflow.core.parallel_config import ParallelConfig
from moeflow.core.token_choice import TokenChoice
from moeflow.kernels.weight_format import LayerFormats

BLOCK_SIZE: Final = 16  # tokens in a KV block


class StateSlotsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of recurrent states."""

    num_slots: int  # total of running requests and prefixes
    checkpoint_every: int  # tokens of a prefix, a multiple of the block size


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of one pass and of the requests that take part."""

    block_size: int = BLOCK_SIZE
    num_blocks: int  # KV blocks in the pool
    max_model_len: int  # prompt and output tokens of one request at most
    max_num_seqs: int = 32  # requests in a pass at most
    max_num_batched_tokens: int = 512  # tokens in a pass at most: bounds how long decodes wait for a prefill chunk
    prefix_caching: bool = True
    num_kept_blocks: int | None = None  # that keep their memory while unused; None: all
    states: StateSlotsConfig | None = None  # None: the model has no recurrent layers
    policy: str = "continuous"  # or "static", the baseline that benchmarks compare with
    batch_timeout_s: float = 0.05  # static: how long the oldest request waits for a batch to fill


class LenderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A machine that lends memory for experts and computes with them, as measured at the first contact."""

    host: str
    port: int
    num_experts: int = 0  # that fit there; 0: it did not answer
    round_trip_s: float = 0.0
    bytes_per_s: float = 0.0  # of the link


class RemoteExpertsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The lenders of an engine."""

    lenders: tuple[LenderConfig, ...]
    token_file: str  # has the cluster's token


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSlotsConfig:
    """How experts come from disk."""

    packed_weights_file: str  # made first if it is not there
    num_slots: int  # experts in memory, over all layers
    slab_bytes: int  # of one expert
    min_slots: int = 2  # that experts keep whatever else needs memory: half is computed with while half is filled
    policy: str = "next-use"  # of eviction: a name of experts/cache/policies.py
    predictor: str = "none"  # of prefetches: a name that experts/predict/registry.py has
    remote: RemoteExpertsConfig | None = None  # None: experts without a slot are on disk only

    def __post_init__(self) -> None:
        """Refuse what no pass could run with. Raises: CapacityError."""
        if self.num_slots < self.min_slots:
            raise CapacityError(
                f"{self.num_slots} of the experts fit into memory, but {self.min_slots} must: raise the memory limit "
                "(--memory), or use a smaller weight format"
            )


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a memory limit is planned to be used for. What then really is held is measured before each pass."""

    limit_bytes: int  # total of all processes
    process_bytes: int  # Python, torch, tokenizer, draft models; for a server, of both processes
    weight_bytes: int  # that stay in memory
    work_bytes: int  # of a pass of max_num_batched_tokens
    is_served: bool = False  # by a process of its own, the parent of the engine's


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModelConfig:
    """A model that drafts tokens for the engine's own."""

    name: str  # as the speculator is called
    model_path: str = ""  # empty: the first layers of the engine's model, with its embeddings and output projection
    num_layers: int
    weight_format: str = ""  # of its own weights, if it has some, as in `EngineConfig`
    embedding_format: str = ""
    router_format: str = "float32"
    kv_dtype: str
    num_blocks: int  # KV blocks of `SchedulerConfig.block_size` tokens
    chunk_tokens: int  # of prompts that it computes before a pass at most
    num_bytes: int  # of its own weights, keys and values

    @property
    def is_early_exit(self) -> bool:
        """Whether it shares the engine's weights."""
        return not self.model_path


class PromptCacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where keys and values of prompts and answers are kept on disk."""

    folder: str
    max_bytes: int  # of all its files, of all writers


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One engine: which model, how, with which limits."""

    model_path: str
    model_name: str  # as the API calls it
    dtype: str  # of activations: "float32" or "bfloat16"
    weight_format: str  # of matrices: a `WeightFormat`
    embedding_format: str  # of token embeddings and the output projection: likewise
    head_format: str = ""  # of the output projection, where it has another than token embeddings
    layer_table_format: str = ""  # of embeddings for each layer, where it has another than those of tokens
    layer_formats: tuple[LayerFormats, ...] = ()  # of each layer's matrices, where they are not all of one format
    mix: str = ""  # that all of these are: a `Mix`; empty: none
    importance_file: str = ""  # importance of inputs, for rounding to a mix; empty: unknown
    cpu_isa: str  # instruction set of the CPU kernels; empty: torch computes, in `dtype`
    router_format: str = "float32"  # of what chooses experts: "float32" or "bfloat16"
    is_own_precision: bool = False  # weights are in the checkpoint's own formats
    is_wide: bool = False  # integer weights meet activations of 16 bits, so that nothing is lost; else of 8
    kv_dtype: str  # of keys and values: "float32", "bfloat16" or "int8"
    device: str  # a torch device: "cpu", "cuda:0"
    num_threads: int  # CPU threads that compute
    scheduler: SchedulerConfig
    kv_cache_bytes: int
    prompt_cache: PromptCacheConfig | None = None  # None: keys and values end with the engine
    experts: ExpertSlotsConfig | None = None  # None: all experts are resident
    hybrid: HybridConfig | None = None  # None: `device` computes all experts
    offload: OffloadConfig | None = None  # to a device that is smaller than the model; None: `device` computes all
    parallel: ParallelConfig | None = None  # None: one process has the whole model
    speculators: tuple[str, ...] = ()  # that draft tokens: names of speculation/registry.py, or of
    draft_models: tuple[DraftModelConfig, ...] = ()  # models that do
    capacity_factor: float = 0.0  # of `ExpertCapacity`; 0: experts take all tokens that choose them
    lossy_top_k: int = 0  # experts of a token that a network chooses; 0: the routers choose
    packed_file: str = (
        ""  # packed weights file that all weights are mapped from; empty: they are packed from the checkpoint
    )
    gpu_memory_bytes: int = 0  # that the user allows on an accelerator; 0: what there is
    memory: MemoryPlan | None = None  # None: the user set no limit
    sampling_defaults: TokenChoice = field(default_factory=TokenChoice)  # of requests that leave these fields open
    record_routing: str = ""  # file that gets what routers choose; empty: none
    graph_file: str = ""  # file that gets the last pass's tasks as a graph, at the end; empty: none
    trace_file: str = ""  # file that gets what each lane did when, at the end; empty: none

    @property
    def memory_bytes(self) -> int:
        """What the user allows in all; 0: what there is."""
        return 0 if self.memory is None else self.memory.limit_bytes

    @property
    def needed_files(self) -> list[str]:
        """Files and folders that must exist before the engine starts. It makes all others that it names."""
        remote = None if self.experts is None else self.experts.remote
        drafts = [draft.model_path for draft in self.draft_models]
        hybrid = () if self.hybrid is None else (self.hybrid.popularity_file, self.hybrid.packed_experts_file)
        token_file = "" if remote is None else remote.token_file
        names = (self.model_path, self.packed_file, self.importance_file, *hybrid, token_file, *drafts)
        return [name for name in names if name]
