"""What llama.cpp and its fork have in common: the C interface that their Python packages hand on.

Next tokens are random: no sampling is timed. A batch's prompts are computed once; the cache is then cut back to
them before every repetition.
"""

from __future__ import annotations

import random
import time
from abc import ABC, abstractmethod
from typing import Any

from benchmarks.peers.workers.protocol import FIRST_ORDINARY_TOKEN, likeliest

MAX_NUM_BATCHED_TOKENS = 2048
MAX_NEW_TOKENS = 128  # of a sequence: what its part of the cache has room for


class GGUFWorker(ABC):
    """A GGUF file, mapped into memory, and a context for every batch size that has been asked for."""

    def __init__(self, llama: Any, wish: dict[str, Any]) -> None:
        """Take the module with the functions of the C interface."""
        self._llama = llama
        self._threads = wish["threads"]
        self._rng = random.Random(wish["seed"])
        llama.llama_backend_init()
        self._model = llama.llama_model_load_from_file(wish["model"].encode(), self.model_params())
        if not self._model:
            raise SystemExit(f"{wish['model']} cannot be loaded")
        self.vocab_size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))
        self._batch = llama.llama_batch_init(MAX_NUM_BATCHED_TOKENS, 0, 1)
        self._contexts: dict[int, Any] = {}
        self._prefilled: dict[int, int] = {}  # batch size -> prompt length in its context

    def model_params(self) -> Any:
        """Return how a model is loaded."""
        return self._llama.llama_model_default_params()

    def context_params(self) -> Any:
        """Return what a context is made with, sizes apart."""
        return self._llama.llama_context_default_params()

    @abstractmethod
    def clear(self, context: Any) -> None:
        """Empty a context's cache."""

    @abstractmethod
    def cut(self, context: Any, sequence: int, length: int) -> None:
        """Forget what follows the first tokens of a sequence."""

    @abstractmethod
    def synchronize(self, context: Any) -> None:
        """Wait until all is computed."""

    def decode(self, prompts: list[list[int]], new_tokens: int) -> float:
        """See `Worker.decode`."""
        num, length = len(prompts), len(prompts[0])
        context = self._context(num, num * (length + MAX_NEW_TOKENS))
        if self._prefilled.get(num) == length:
            for sequence in range(num):
                self.cut(context, sequence, length)
        else:
            self.clear(context)
            rows = [
                (token, position, sequence, position == length - 1)
                for sequence, prompt in enumerate(prompts)
                for position, token in enumerate(prompt)
            ]
            for at in range(0, len(rows), MAX_NUM_BATCHED_TOKENS):
                self._run(context, rows[at : at + MAX_NUM_BATCHED_TOKENS])
            self._prefilled[num] = length
        self.synchronize(context)
        start = time.perf_counter()
        for step in range(new_tokens):
            self._run(context, [(self._random_token(), length + step, sequence, True) for sequence in range(num)])
        self.synchronize(context)
        return time.perf_counter() - start

    def prefill(self, prompt: list[int]) -> float:
        """See `Worker.prefill`."""
        context = self._context(0, max(len(prompt), 512))
        self.clear(context)
        start = time.perf_counter()
        self._run(context, [(token, at, 0, at == len(prompt) - 1) for at, token in enumerate(prompt)])
        self.synchronize(context)
        return time.perf_counter() - start

    def follow(self, prompt: list[int], tokens: list[int]) -> dict[str, Any]:
        """See `Following.follow`; it is fed the tokens."""
        context = self._context(1, MAX_NUM_BATCHED_TOKENS)
        self.clear(context)
        start = time.perf_counter()
        self._run(context, [(token, at, 0, at == len(prompt) - 1) for at, token in enumerate(prompt)])
        self.synchronize(context)
        prefilled = time.perf_counter()
        for at, token in enumerate(tokens, len(prompt)):
            self._run(context, [(token, at, 0, True)])
        self.synchronize(context)
        return {"prefill_s": prefilled - start, "decode_s": time.perf_counter() - prefilled, "tokens": tokens}

    def counters(self) -> dict[str, float]:
        """It counts nothing."""
        return {}

    def logprobs(self, prompt: list[int], count: int) -> list[tuple[int, float]]:
        """See `Worker.logprobs`."""
        self.prefill(prompt)
        return likeliest(self._llama.llama_get_logits_ith(self._contexts[0], -1)[: self.vocab_size], count)

    def _context(self, num_sequences: int, num_tokens: int) -> Any:
        """Return the context kept for that many sequences; 0: the one for prefills."""
        if num_sequences not in self._contexts:
            params = self.context_params()
            params.n_ctx = num_tokens
            params.n_batch = MAX_NUM_BATCHED_TOKENS
            params.n_seq_max = max(num_sequences, 1)
            params.n_threads = params.n_threads_batch = self._threads
            context = self._llama.llama_init_from_model(self._model, params)
            if not context:
                raise SystemExit(f"there is no context for {num_sequences} sequences")
            self._contexts[num_sequences] = context
        return self._contexts[num_sequences]

    def _run(self, context: Any, rows: list[tuple[int, int, int, bool]]) -> None:
        """Compute rows of (token, position, sequence, whether its logits are wanted)."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for at, (token, position, sequence, wants_logits) in enumerate(rows):
            batch.token[at] = token
            batch.pos[at] = position
            batch.n_seq_id[at] = 1
            batch.seq_id[at][0] = sequence
            batch.logits[at] = wants_logits
        status = self._llama.llama_decode(context, batch)
        if status != 0:
            raise SystemExit(f"llama_decode failed with {status}")

    def _random_token(self) -> int:
        return self._rng.randrange(FIRST_ORDINARY_TOKEN, self.vocab_size)
