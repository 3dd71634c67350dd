"""OpenVINO GenAI's pipeline, as its users call it. Chooses the likeliest token: that is part of the time.

Weights are what its exporter makes of a model of this size unless told otherwise: 8 bits, a scale a row. The times are
its own, of the tokens after the first; a prompt is computed in every repetition.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai

from studies.peers.workers.protocol import serve

VOCAB_SIZE = 32000


class OpenvinoWorker:
    """An exported folder, compiled for the CPU, with 16 bits for keys and values."""

    vocab_size = VOCAB_SIZE

    def __init__(self, wish: dict[str, Any]) -> None:
        options = {"INFERENCE_NUM_THREADS": wish["threads"], "KV_CACHE_PRECISION": "f16"}
        self._pipeline = genai.LLMPipeline(wish["model"], "CPU", **options)

    def decode(self, prompts: list[list[int]], new_tokens: int) -> float:
        """See `Worker.decode`."""
        metrics = self._generate(prompts, new_tokens + 1).perf_metrics
        return (metrics.get_generate_duration().mean - metrics.get_ttft().mean) / 1000

    def prefill(self, prompt: list[int]) -> float:
        """See `Worker.prefill`."""
        start = time.perf_counter()
        self._generate([prompt], 1)
        return time.perf_counter() - start

    def _generate(self, prompts: list[list[int]], num_tokens: int) -> Any:
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = num_tokens
        config.ignore_eos, config.do_sample = True, False
        ids = np.array(prompts, dtype=np.int64)
        inputs = genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        result = self._pipeline.generate(inputs, config)
        if any(len(tokens) != num_tokens for tokens in result.tokens):
            raise SystemExit("the pipeline did not generate as many tokens as asked")
        return result


if __name__ == "__main__":
    serve(OpenvinoWorker)
