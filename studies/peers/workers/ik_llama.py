"""ik_llama.cpp, the fork of llama.cpp that is fastest on CPUs, by the C interface of ik-llama-cpp-python.

As its users run it: weights repacked while they are loaded, gate and up of experts in one operation. The package loads
a library that is newer than itself where it is told to; a header then says how structs look there.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from ik_llama_cpp import _ctypes_api as llama

from studies.peers.workers.c_structs import read_struct
from studies.peers.workers.gguf_worker import GGUFWorker
from studies.peers.workers.protocol import serve


class IkLlamaWorker(GGUFWorker):
    """A GGUF file, repacked into memory of its own."""

    def __init__(self, wish: dict[str, Any]) -> None:
        if "header" in wish:
            _take_structs(Path(wish["header"]).read_text(encoding="utf-8"))
        library = llama._lib  # has two functions that the package does not expose
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


def _take_structs(header: str) -> None:
    model, context = (read_struct(header, f"llama_{name}_params") for name in ("model", "context"))
    llama.llama_model_default_params.restype = model
    llama.llama_model_load_from_file.argtypes = [ctypes.c_char_p, model]
    llama.llama_context_default_params.restype = context
    llama.llama_init_from_model.argtypes = [ctypes.c_void_p, context]


if __name__ == "__main__":
    serve(IkLlamaWorker)
