"""ik_llama.cpp, the fork of llama.cpp that is fastest on CPUs, by the C interface of ik-llama-cpp-python.

As its users run it: weights repacked while they are loaded, gate and up of experts in one operation.
"""

from __future__ import annotations

import ctypes
from typing import Any

from ik_llama_cpp import _ctypes_api as llama

from benchmarks.peers.workers.gguf_worker import GGUFWorker
from benchmarks.peers.workers.protocol import serve


class IkLlamaWorker(GGUFWorker):
    """A GGUF file, repacked into memory of its own."""

    def __init__(self, wish: dict[str, Any]) -> None:
        library = llama._lib  # has two functions that the package does not hand on
        self._cut, self._synchronize = library.llama_kv_cache_seq_rm, library.llama_synchronize
        self._cut.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32]
        self._synchronize.argtypes = [ctypes.c_void_p]
        super().__init__(llama, wish)

    def model_params(self) -> Any:
        """See `GGUFWorker.model_params`."""
        params = super().model_params()
        params.repack_tensors, params.use_mmap = True, False
        return params

    def context_params(self, num_sequences: int) -> Any:
        """See `GGUFWorker.context_params`. With flash attention it aborts in batches of several sequences."""
        params = super().context_params(num_sequences)
        params.fused_moe_up_gate = True
        params.flash_attn = num_sequences <= 1
        return params

    def clear(self, context: Any) -> None:
        """See `GGUFWorker.clear`."""
        llama.llama_kv_cache_clear(context)

    def cut(self, context: Any, sequence: int, length: int) -> None:
        """See `GGUFWorker.cut`."""
        self._cut(context, sequence, length, -1)

    def synchronize(self, context: Any) -> None:
        """See `GGUFWorker.synchronize`."""
        self._synchronize(context)


if __name__ == "__main__":
    serve(IkLlamaWorker)
