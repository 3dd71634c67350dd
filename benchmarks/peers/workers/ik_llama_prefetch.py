"""ik_llama.cpp built from its sources, which read experts ahead into the page cache as soon as they are chosen.

What `--prefetch-experts --defer-experts` sets. The file stays mapped: repacking would hold all of it in memory.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from ik_llama_cpp import _ctypes_api as llama

from benchmarks.peers.workers.c_structs import read_struct
from benchmarks.peers.workers.ik_llama import IkLlamaWorker
from benchmarks.peers.workers.protocol import serve


class IkLlamaPrefetchWorker(IkLlamaWorker):
    """A GGUF file, mapped, in the library that the package is told to load; its header says how structs look there."""

    def __init__(self, wish: dict[str, Any]) -> None:
        header = Path(wish["header"]).read_text(encoding="utf-8")
        model, context = (read_struct(header, f"llama_{name}_params") for name in ("model", "context"))
        llama.llama_model_default_params.restype = model
        llama.llama_model_load_from_file.argtypes = [ctypes.c_char_p, model]
        llama.llama_context_default_params.restype = context
        llama.llama_init_from_model.argtypes = [ctypes.c_void_p, context]
        super().__init__(wish)

    def model_params(self) -> Any:
        """See `GGUFWorker.model_params`."""
        params = super().model_params()
        params.repack_tensors, params.use_mmap, params.defer_experts = False, True, True
        return params

    def context_params(self, num_sequences: int) -> Any:
        """See `GGUFWorker.context_params`."""
        params = super().context_params(num_sequences)
        params.prefetch_experts = True
        return params


if __name__ == "__main__":
    serve(IkLlamaPrefetchWorker)
