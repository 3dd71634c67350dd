"""What the user said, before anything is decided; and what holds where many said nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from moeflow.core.errors import ConfigError

BLOCK_SIZE: Final = 16
DEFAULT_MAX_NUM_SEQS: Final = 32
OFFLOADED_MAX_NUM_SEQS: Final = 256  # where weights go to a device each pass: the more requests share that, the better
OFFLOADED_NUM_BATCHED_TOKENS: Final = 2048
DEFAULT_MAX_NUM_BATCHED_TOKENS: Final = 512  # about a second on two CPU cores: as long as decodes wait for a prefill
DISK_NUM_BATCHED_TOKENS: Final = (2048, 1024)  # where a pass reads most of the model: the first with room for its work


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the user said. None or "auto": decide for me."""

    model: str | None = None  # Hugging Face folder or GGUF file; None: the built-in model
    model_name: str | None = None
    dtype: str = "auto"
    quantize: str | None = None  # "int8" or "int4"; None: leave the weights as they are
    kv_dtype: str = "auto"
    device: str = "auto"
    pipeline: str | None = None  # by which weights go to a device that is smaller than the model
    micro_batch: int | None = None  # tokens that go through such a pipeline together
    resident_experts: float | None = None  # share of them that stays on such a device
    num_threads: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_cache_bytes: int | None = None
    prefix_caching: bool = True
    memory_bytes: int | None = None  # for everything; experts that do not fit come from disk
    device_memory_bytes: int | None = None  # of an accelerator's memory, that the engine may use
    is_served: bool = False  # by a process of its own, which memory_bytes has to cover, too
    slab_file: Path | None = None  # packed weights, or where experts will be packed; None: one in cache_dir
    expert_policy: str = "auto"  # which expert leaves memory for another
    predictor: str = "auto"  # what experts are read ahead by
    record_routing: Path | None = None  # file that gets what routers choose
    graph_file: Path | None = None  # file that gets the last pass's tasks as a graph, for GraphViz
    trace_file: Path | None = None  # file that gets what each lane did when, for Perfetto
    cpu_isa: str = ""  # the best instruction set that the CPU kernels may use; empty: the best there is
    cache_dir: Path | None = None  # where the built-in model and packed experts are kept

    def check_counts(self) -> None:
        """Raises: ConfigError for a number below 1 of what there must be at least one of."""
        for name in ("max_num_seqs", "max_num_batched_tokens", "num_threads", "max_model_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")
