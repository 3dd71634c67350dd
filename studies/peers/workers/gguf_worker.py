"""What llama.cpp and its fork have in common: the C interface that their Python packages expose.

Next tokens are random: no sampling is timed. A batch's prompts are computed once; the cache is then cut back to
them before every repetition.
"""

from __future__ import annotations

import random
import time
from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from studies.peers.workers.protocol import FIRST_ORDINARY_TOKEN, FollowClock, likeliest

MAX_NUM_BATCHED_TOKENS = 2048
MAX_NEW_TOKENS = 128  # of a sequence: the capacity of its part of the cache


class GGUFWorker(ABC):
    """A GGUF file, mapped into memory, and a context for every batch size and length that has been asked for."""

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
        self._contexts: dict[tuple[int, int], Any] = {}  # by sequences, and by tokens of all of them
        self._prefilled: set[tuple[int, int]] = set()  # batches, prompt lengths whose prompts are in their contexts

    def model_params(self) -> Any:
        """Return how a model is loaded."""
        return self._llama.llama_model_default_params()

    def context_params(self, num_sequences: int) -> Any:
        """Return what a context for so many sequences is made with, sizes apart."""
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
        if (num, length) in self._prefilled:
            for sequence in range(num):
                self.cut(context, sequence, length)
        else:
            self.clear(context)
            for sequence, prompt in enumerate(prompts):
                self._prompt(context, prompt, sequence)
            self._prefilled.add((num, length))
        self.synchronize(context)
        start = time.perf_counter()
        for step in range(new_tokens):
            self._run(context, [(self._random_token(), length + step, sequence, True) for sequence in range(num)])
        self.synchronize(context)
        return time.perf_counter() - start

    def prefill(self, prompt: list[int]) -> float:
        """See `Worker.prefill`."""
        context = self._prefill_context(prompt)
        self.clear(context)
        start = time.perf_counter()
        self._prompt(context, prompt)
        self.synchronize(context)
        return time.perf_counter() - start

    def follow(self, prompt: list[int], tokens: list[int]) -> dict[str, Any]:
        """See `Following.follow`; it is fed the tokens."""
        context = self._context(1, MAX_NUM_BATCHED_TOKENS)
        self.clear(context)
        clock = FollowClock()
        self._prompt(context, prompt)
        self.synchronize(context)
        clock.mark()
        for at, token in enumerate(tokens, len(prompt)):
            self._run(context, [(token, at, 0, True)])
        self.synchronize(context)
        return clock.told(tokens)

    def counters(self) -> dict[str, float]:
        """It counts nothing."""
        return {}

    def logprobs(self, prompt: list[int], count: int) -> list[tuple[int, float]]:
        """See `Worker.logprobs`."""
        self.prefill(prompt)
        return likeliest(self._logits(self._prefill_context(prompt), -1).tolist(), count)

    def text_logprobs(self, text: list[int]) -> tuple[list[float], list[int]]:
        """See `Scoring.text_logprobs`."""
        context = self._prefill_context(text)
        self.clear(context)
        self._run(context, [(token, at, 0, True) for at, token in enumerate(text)])
        logprobs, tokens = [], []
        for at, token in enumerate(text[1:]):
            logits = self._logits(context, at)
            tokens.append(int(logits.argmax()))
            top = logits.max()
            logprobs.append(float(logits[token] - top - np.log(np.exp(logits - top).sum())))
        return logprobs, tokens

    def _logits(self, context: Any, at: int) -> np.ndarray[Any, np.dtype[np.float64]]:
        logits = self._llama.llama_get_logits_ith(context, at)
        return np.ctypeslib.as_array(logits, (self.vocab_size,)).astype(np.float64)

    def _prefill_context(self, prompt: list[int]) -> Any:
        return self._context(0, max(len(prompt), 512))

    def _context(self, num_sequences: int, num_tokens: int) -> Any:
        """Return the context kept for that many sequences and tokens; 0: one for prefills."""
        key = num_sequences, num_tokens
        if key not in self._contexts:
            params = self.context_params(num_sequences)
            params.n_ctx = num_tokens
            params.n_batch = MAX_NUM_BATCHED_TOKENS
            params.n_seq_max = max(num_sequences, 1)
            params.n_threads = params.n_threads_batch = self._threads
            context = self._llama.llama_init_from_model(self._model, params)
            if not context:
                raise SystemExit(f"there is no context for {num_sequences} sequences")
            self._contexts[key] = context
        return self._contexts[key]

    def _prompt(self, context: Any, prompt: list[int], sequence: int = 0) -> None:
        """Compute a prompt, the logits of its last token alone, in batches as large as may be."""
        rows = [(token, at, sequence, at == len(prompt) - 1) for at, token in enumerate(prompt)]
        for start in range(0, len(rows), MAX_NUM_BATCHED_TOKENS):
            self._run(context, rows[start : start + MAX_NUM_BATCHED_TOKENS])

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
