"""llama.cpp, by the C interface that llama-cpp-python exposes."""

from __future__ import annotations

from typing import Any

import llama_cpp as llama

from studies.peers.workers.gguf_worker import GGUFWorker
from studies.peers.workers.protocol import serve


class LlamaWorker(GGUFWorker):
    """A GGUF file, mapped into memory."""

    def __init__(self, wish: dict[str, Any]) -> None:
        self._log = llama.llama_log_callback(lambda _level, _message, _data: None)  # kept alive as long as this
        llama.llama_log_set(self._log, None)
        super().__init__(llama, wish)

    def clear(self, context: Any) -> None:
        """See `GGUFWorker.clear`."""
        llama.llama_memory_clear(llama.llama_get_memory(context), True)

    def cut(self, context: Any, sequence: int, length: int) -> None:
        """See `GGUFWorker.cut`."""
        llama.llama_memory_seq_rm(llama.llama_get_memory(context), sequence, length, -1)

    def synchronize(self, context: Any) -> None:
        """See `GGUFWorker.synchronize`."""
        llama.llama_synchronize(context)


if __name__ == "__main__":
    serve(LlamaWorker)
