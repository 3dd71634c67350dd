"""Hugging Face transformers, called pass by pass with its own cache.

Next tokens are random: no sampling is timed. A batch's prompts are computed once; the cache is then cut back to
them before every repetition.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from studies.peers.workers.protocol import FIRST_ORDINARY_TOKEN, likeliest, serve


class TransformersWorker:
    """A model with the fastest of its expert implementations on a CPU."""

    def __init__(self, wish: dict[str, Any]) -> None:
        torch.set_num_threads(wish["threads"])
        torch.manual_seed(wish["seed"])
        self._model = AutoModelForCausalLM.from_pretrained(
            wish["model"],
            dtype=getattr(torch, wish["dtype"]),
            experts_implementation="grouped_mm",
            attn_implementation="sdpa",
        ).eval()
        self.vocab_size = self._model.config.vocab_size
        self._caches: dict[tuple[int, int], DynamicCache] = {}  # (batch size, prompt length) -> the prompts' cache

    @torch.inference_mode()
    def decode(self, prompts: list[list[int]], new_tokens: int) -> float:
        """See `Worker.decode`."""
        num, length = len(prompts), len(prompts[0])
        cache = self._caches.get((num, length))
        if cache is None:
            cache = self._caches[num, length] = self._run(torch.tensor(prompts), DynamicCache()).past_key_values
        excess = cache.get_seq_length() - length
        if excess:
            cache.crop(-excess)
        start = time.perf_counter()
        for _ in range(new_tokens):
            self._run(torch.randint(FIRST_ORDINARY_TOKEN, self.vocab_size, (num, 1)), cache)
        return time.perf_counter() - start

    @torch.inference_mode()
    def prefill(self, prompt: list[int]) -> float:
        """See `Worker.prefill`."""
        start = time.perf_counter()
        self._run(torch.tensor([prompt]), DynamicCache())
        return time.perf_counter() - start

    @torch.inference_mode()
    def logprobs(self, prompt: list[int], count: int) -> list[tuple[int, float]]:
        """See `Worker.logprobs`."""
        return likeliest(self._run(torch.tensor([prompt]), DynamicCache()).logits[0, -1].tolist(), count)

    @torch.inference_mode()
    def text_logprobs(self, text: list[int]) -> tuple[list[float], list[int]]:
        """See `Scoring.text_logprobs`."""
        logits = self._model(input_ids=torch.tensor([text]), use_cache=False).logits[0, :-1]
        targets = torch.tensor(text[1:]).unsqueeze(1)
        logprobs = logits.double().log_softmax(-1).gather(1, targets)[:, 0]
        return logprobs.tolist(), logits.argmax(-1).tolist()

    def _run(self, token_ids: torch.Tensor, cache: DynamicCache) -> Any:
        return self._model(input_ids=token_ids, past_key_values=cache, use_cache=True, logits_to_keep=1)


if __name__ == "__main__":
    serve(TransformersWorker)
