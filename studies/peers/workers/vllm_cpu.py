"""vLLM's build for CPUs, stepped in this process. Samples at temperature 1: that is part of the time.

Runs without compilation, which takes minutes and which few use on a CPU. vLLM measures the machine's cores by
itself, so it is told to bind to the first ones.
"""

from __future__ import annotations

import os
import time
from typing import Any

from studies.peers.workers.protocol import serve

MAX_MODEL_LEN = 1024
KV_CACHE_GIB = 1


class VllmWorker:
    """vLLM's engine without its own process, so that one clock and one process's figures tell all."""

    def __init__(self, wish: dict[str, Any]) -> None:
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(KV_CACHE_GIB)
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{wish['threads'] - 1}"
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"
        from vllm import LLM, SamplingParams  # they read the environment as they are imported

        self._SamplingParams = SamplingParams
        llm = LLM(
            model=wish["model"],
            dtype=wish["dtype"],
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=32,
            max_num_batched_tokens=2048,
            enable_prefix_caching=False,
            seed=wish["seed"],
        )
        self._engine = llm.llm_engine
        self.vocab_size = llm.model_config.get_vocab_size()
        self._num_requests = 0

    def decode(self, prompts: list[list[int]], new_tokens: int) -> float:
        """See `Worker.decode`."""
        self._submit(prompts, new_tokens + 1)
        started: set[str] = set()
        while len(started) < len(prompts):
            started.update(output.request_id for output in self._engine.step() if output.outputs[0].token_ids)
        start = time.perf_counter()
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return time.perf_counter() - start

    def prefill(self, prompt: list[int]) -> float:
        """See `Worker.prefill`."""
        start = time.perf_counter()
        self._submit([prompt], 1)
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return time.perf_counter() - start

    def logprobs(self, prompt: list[int], count: int) -> list[tuple[int, float]]:
        """See `Worker.logprobs`."""
        params = self._SamplingParams(temperature=0.0, max_tokens=1, logprobs=count, detokenize=False)
        self._num_requests += 1
        self._engine.add_request(str(self._num_requests), {"prompt_token_ids": prompt}, params)
        outputs = []
        while self._engine.has_unfinished_requests():
            outputs += self._engine.step()
        found = outputs[-1].outputs[0].logprobs[0].items()
        return sorted(((token, each.logprob) for token, each in found), key=lambda pair: -pair[1])[:count]

    def _submit(self, prompts: list[list[int]], new_tokens: int) -> None:
        params = self._SamplingParams(
            temperature=1.0, min_tokens=new_tokens, max_tokens=new_tokens, ignore_eos=True, detokenize=False
        )
        for prompt in prompts:
            self._num_requests += 1
            self._engine.add_request(str(self._num_requests), {"prompt_token_ids": prompt}, params)


if __name__ == "__main__":
    serve(VllmWorker)
