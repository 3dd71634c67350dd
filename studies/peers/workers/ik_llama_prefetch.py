"""ik_llama.cpp built from its sources, which read experts ahead into the page cache as soon as they are chosen.

What `--prefetch-experts --defer-experts` sets. The file stays mapped: repacking would hold all of it in memory.
"""

from __future__ import annotations

from typing import Any

from studies.peers.workers.ik_llama import IkLlamaWorker
from studies.peers.workers.protocol import serve


class IkLlamaPrefetchWorker(IkLlamaWorker):
    """A GGUF file, mapped."""

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
