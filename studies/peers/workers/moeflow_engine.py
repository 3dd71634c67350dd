"""Our own engine, through the same door as the server: decided settings, submissions, steps.

Samples at temperature 1: that is part of the time. Greedy choices would cost less, and of a model with random
weights they end in loops, whose tokens need fewer experts than others' random ones.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import msgspec

from moeflow.core.engine_messages import Submission, TokenOutput
from moeflow.core.errors import MoeflowError
from moeflow.core.sampling_params import SamplingParams
from moeflow.engine.engine import Engine
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings
from studies.peers.workers.protocol import FollowClock, serve

KV_TOKENS = 4096  # what the largest batch needs, doubled; or a prompt's and what a pass may add
MAX_MODEL_LEN = 1024
MAX_NUM_BATCHED_TOKENS = 2048
_COUNTED = ("expert_", "gpu_pairs", "cpu_pairs", "streamed_passes")


class MoeflowWorker:
    """An engine in this process, large enough for every case, without reuse of prefixes."""

    def __init__(self, wish: dict[str, Any]) -> None:
        settings = Settings(
            model=wish["model"],
            num_threads=wish["threads"],
            max_model_len=wish.get("max_model_len", MAX_MODEL_LEN),
            max_num_seqs=32,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            prefix_caching=False,
            **{
                name: Path(value) if name == "packed_weights_file" else value
                for name, value in wish["settings"].items()
            },
        )
        config = resolve(settings).config
        weights = wish.get("weights", config.weight_format)
        if config.weight_format != weights:  # a figure under the wrong name is worse than none
            raise SystemExit(f"the engine would keep the weights in {config.weight_format}, not in {weights}")
        if settings.memory_bytes is None:
            block_bytes = config.kv_cache_bytes // config.scheduler.num_blocks
            kv_tokens = max(KV_TOKENS, config.scheduler.max_model_len + MAX_NUM_BATCHED_TOKENS)
            kv_bytes = block_bytes * kv_tokens // config.scheduler.block_size
            config = resolve(dataclasses.replace(settings, kv_cache_bytes=kv_bytes)).config
        if "hybrid" in wish:
            if config.hybrid is None:
                raise SystemExit("the GPU holds the model, or does not share its experts with the CPU")
            config = dataclasses.replace(config, hybrid=msgspec.structs.replace(config.hybrid, **wish["hybrid"]))
        self._engine = Engine.load(config)
        self.vocab_size = self._engine.model.vocab_size
        self._seed = wish["seed"]

    def decode(self, prompts: list[list[int]], new_tokens: int) -> float:
        """See `Worker.decode`."""
        self._submit(prompts, SamplingParams(max_tokens=new_tokens + 1, temperature=1.0, ignore_eos=True))
        started: list[TokenOutput] = []
        while not started:
            started = self._step()
        if len(started) != len(prompts):
            raise SystemExit("not all prompts were computed when the first was")
        start = time.perf_counter()
        while self._engine.has_work:
            self._step()
        return time.perf_counter() - start

    def prefill(self, prompt: list[int]) -> float:
        """See `Worker.prefill`."""
        start = time.perf_counter()
        self._submit([prompt], SamplingParams(max_tokens=1, temperature=1.0, ignore_eos=True))
        while self._engine.has_work:
            self._step()
        return time.perf_counter() - start

    def follow(self, prompt: list[int], tokens: list[int]) -> dict[str, Any]:
        """See `Following.follow`; it chooses by itself, and as many."""
        clock = FollowClock()
        self._submit([prompt], SamplingParams(max_tokens=len(tokens) + 1, temperature=0.0, ignore_eos=True))
        chosen: list[int] = []
        while not chosen:
            chosen += [token for output in self._step() for token in output.token_ids]
        clock.mark()
        while self._engine.has_work:
            chosen += [token for output in self._step() for token in output.token_ids]
        return clock.told(chosen)

    def counters(self) -> dict[str, float]:
        """Return counts of experts, as the server's metrics do."""
        stats = self._engine.stats()
        return {name: getattr(stats, name) for name in stats.__struct_fields__ if name.startswith(_COUNTED)}

    def logprobs(self, prompt: list[int], count: int) -> list[tuple[int, float]]:
        """See `Worker.logprobs`."""
        self._submit([prompt], SamplingParams(max_tokens=1, temperature=0.0, logprobs=count, ignore_eos=True))
        found = self._step()[0].logprobs
        assert found is not None
        return found[0].top

    def text_logprobs(self, text: list[int]) -> tuple[list[float], list[int]]:
        """See `Scoring.text_logprobs`."""
        self._submit([text], SamplingParams(max_tokens=0, temperature=0.0, prompt_logprobs=1))
        outputs: list[TokenOutput] = []
        while self._engine.has_work:
            outputs += self._step()
        tokens = [token for token in outputs[-1].prompt_logprobs or () if token is not None]
        return [token.logprob for token in tokens], [token.top[0][0] for token in tokens]

    def _submit(self, prompts: list[list[int]], sampling: SamplingParams) -> None:
        for index, prompt in enumerate(prompts):
            self._engine.submit(Submission(str(index), prompt, sampling, seed=self._seed + index))

    def _step(self) -> list[TokenOutput]:
        outputs = self._engine.step()
        for output in outputs:
            if output.error is not None:
                raise SystemExit(output.error)
        return outputs


if __name__ == "__main__":
    try:
        serve(MoeflowWorker)
    except MoeflowError as error:
        raise SystemExit(str(error)) from None  # a line of the log, in place of a traceback
