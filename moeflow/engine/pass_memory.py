"""What a user may change where a pass finds no memory: of a GPU, or of the host."""

from __future__ import annotations

from typing import Final

from moeflow.core.engine_config import EngineConfig
from moeflow.core.errors import CapacityError
from moeflow.core.out_of_memory import is_out_of_memory

_FEWER: Final = "fewer tokens in a pass (--max-num-batched-tokens), fewer requests (--max-num-seqs)"


def explain(error: Exception, config: EngineConfig, num_tokens: int) -> None:
    """Raise CapacityError for the error of a pass of so many tokens, if it is a lack of memory."""
    if isinstance(error, MemoryError) or is_out_of_memory(error):
        where = config.device if config.offload is None else config.offload.torch_device
        need = f"a pass of {num_tokens} tokens finds no memory on {where}"
        raise CapacityError(f"{need}: take {_remedy(config)}") from error


def _remedy(config: EngineConfig) -> str:
    if config.offload is not None:
        return f"{_FEWER}, or smaller micro-batches (--micro-batch, --prompt-micro-batch)"
    if config.hybrid is not None:
        return f"{_FEWER}, or fewer experts on the GPU (less --gpu-memory)"
    if config.device != "cpu":
        return f"{_FEWER}, a smaller KV cache (--kv-cache), or less of the GPU (--gpu-memory)"
    return f"{_FEWER}, or a smaller KV cache (--kv-cache)"
