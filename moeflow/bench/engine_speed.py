"""How fast an engine decodes and prefills, driven pass by pass as it is when it serves.

Decode is timed once every request of the batch has its first token: so many passes, nothing else in them.
Prefill is one prompt up to its first token, in the chunks that serving would cut it into. Prompts are random
and new for every measurement.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moeflow.core.engine_messages import Submission, TokenOutput
from moeflow.core.errors import EngineError
from moeflow.core.sampling_params import SamplingParams
from moeflow.engine.engine import Engine
from moeflow.planner.costs.model_costs import ModelCosts


@dataclass(frozen=True, slots=True)
class SpeedCase:
    """One row of the table."""

    batch_size: int
    prompt_len: int
    new_tokens: int  # decode passes that are timed; 0: the prefill is

    @property
    def name(self) -> str:
        """Its name in tables."""
        return f"decode, batch {self.batch_size}" if self.new_tokens else f"prefill {self.prompt_len}"

    @property
    def num_tokens(self) -> int:
        """Tokens that the rate counts."""
        return self.batch_size * (self.new_tokens or self.prompt_len)

    def kv_tokens(self, max_num_batched_tokens: int) -> int:
        """Return how many tokens' K and V the case holds at most: while the last prompts are prefilled, the first
        requests already decode."""
        num_prefills = -(-self.batch_size * self.prompt_len // max(max_num_batched_tokens - self.batch_size, 1)) + 1
        return self.batch_size * (self.prompt_len + self.new_tokens + num_prefills)

    def cost(self, costs: ModelCosts) -> tuple[float, float]:
        """Return the bytes that the timed part reads and the operations that it does at least, over all passes.

        A pass reads each weight once, and only the experts that even routers choose. Norms, activations, embedding rows
        and the K and V of a prefill are left out (under 1%).
        """
        if self.new_tokens:
            num_tokens = num_sampled = self.batch_size
            num_seen = num_read = self.batch_size * (self.prompt_len + (self.new_tokens + 1) // 2)
        else:
            num_tokens, num_sampled, num_read = self.prompt_len, 1, 0
            num_seen = self.prompt_len * (self.prompt_len + 1) // 2
        attention = costs.attention(num_tokens, num_seen, num_read)
        layer = (costs.pre_attention(num_tokens), attention, costs.output_projection(num_tokens))
        works = [(costs.shape.num_layers, work) for work in layer] + costs.feed_forward(num_tokens)
        works.append((1, costs.head(num_sampled)))
        num_passes = self.new_tokens or 1
        num_bytes = num_passes * sum(count * work.num_bytes for count, work in works)
        return num_bytes, num_passes * sum(count * work.num_flops for count, work in works)


class SetBackError(EngineError):
    """A request was set back for want of KV cache while it was timed."""


class Stopwatch:
    """Times cases on one engine.

    temperature: 0 repeats itself sooner or later, and then uses the same experts again and again.
    text: prompts are pieces of these tokens. Without it prompts are random, and routers choose other experts.
    """

    def __init__(
        self,
        engine: Engine,
        seed: int,
        clock: Callable[[], float] = time.perf_counter,
        temperature: float = 0.0,
        text: Sequence[int] = (),
    ) -> None:
        self._engine = engine
        self._seed = seed
        self._clock = clock
        self._temperature = temperature
        self._text = text

    def why_not(self, case: SpeedCase) -> str | None:
        """Return why the engine cannot run a case; None if it can."""
        model, limits = self._engine.model, self._engine.config.scheduler
        need = case.kv_tokens(limits.max_num_batched_tokens)
        per_request = need // case.batch_size + 1
        if case.batch_size > limits.max_num_seqs:
            return f"the engine computes {limits.max_num_seqs} requests together at most: raise --max-num-seqs"
        if per_request > model.max_model_len:
            return f"it needs {per_request} tokens a request, but the engine allows {model.max_model_len}"
        if need > model.kv_capacity_tokens:
            return f"it needs a KV cache of {need} tokens, but it holds {model.kv_capacity_tokens}: raise --kv-cache"
        return None

    def measure(self, case: SpeedCase, repetition: int, on_start: Callable[[], None] = lambda: None) -> float:
        """Return tokens a second; `on_start` is called where what counts begins.

        Raises: EngineError if a pass fails.
        """
        rng = random.Random(f"{self._seed} {case.name} {repetition}")
        prompts = [self._prompt(rng, case.prompt_len) for _ in range(case.batch_size)]
        try:
            seconds = self._decode(case, prompts, on_start) if case.new_tokens else self._prefill(prompts, on_start)
        finally:
            self._engine.cancel_all()
            while self._engine.has_work:
                self._engine.step()
        return case.num_tokens / seconds

    def _prompt(self, rng: random.Random, length: int) -> list[int]:
        if not self._text:
            return [rng.randrange(self._engine.model.vocab_size) for _ in range(length)]
        start = rng.randrange(len(self._text))
        return [self._text[(start + number) % len(self._text)] for number in range(length)]

    def _prefill(self, prompts: list[list[int]], on_start: Callable[[], None]) -> float:
        on_start()
        start = self._clock()
        self._submit(prompts, max_tokens=1)
        while self._engine.has_work:
            self._step()
        return self._clock() - start

    def _decode(self, case: SpeedCase, prompts: list[list[int]], on_start: Callable[[], None]) -> float:
        self._submit(prompts, max_tokens=None)
        started: set[str] = set()
        while len(started) < len(prompts):
            started.update(output.request_id for output in self._step())
        on_start()
        start = self._clock()
        for _ in range(case.new_tokens):
            if len(self._step()) != len(prompts):
                raise SetBackError("a request was set back for want of KV cache: raise --kv-cache")
        return self._clock() - start

    def _submit(self, prompts: list[list[int]], max_tokens: int | None) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=self._temperature, ignore_eos=True)
        for index, prompt in enumerate(prompts):
            self._engine.submit(Submission(str(index), prompt, sampling, seed=index))

    def _step(self) -> list[TokenOutput]:
        outputs = self._engine.step()
        for output in outputs:
            if output.error is not None:
                raise EngineError(output.error)
        return outputs
