"""The planned usage of an engine: lengths and number of requests, and the goal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Final

from moeflow.core.engine_config import BLOCK_SIZE
from moeflow.core.errors import ConfigError
from moeflow.core.model_config import ModelConfig
from moeflow.core.plan import Goal, Workload
from moeflow.planner.search.objective import MAX_SEQUENCES, Objective

TYPICAL: Final = Workload(prompt_len=512, gen_len=128, max_prompt_len=512)  # where nothing is known of requests
MAX_SEQUENCES_ON_HOST: Final = 256  # beyond, a step of a host is bound by arithmetic and answers only come later


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """How an engine will be used. What the user leaves open is chosen for it."""

    workload: Workload = TYPICAL
    goal: Goal = "throughput"
    num_sequences: int | None = None  # that decode together; None: as many as is best
    num_requests: int | None = None  # there are no more of them; None: unknown
    is_interactive: bool = False  # people read along: neither passes nor steps may take long
    reserves_kv: bool = False  # the KV cache must hold all concurrent requests of the workload

    def max_sequences(self, *, has_device: bool) -> int:
        """Return how many sequences may decode concurrently."""
        return self.num_requests or self.num_sequences or (MAX_SEQUENCES if has_device else MAX_SEQUENCES_ON_HOST)

    def objective(self, memory_limits: Mapping[str, int], *, has_device: bool = False) -> Objective:
        """Return what a search makes best, within these bytes of each tier."""
        return Objective(
            goal=self.goal,
            num_sequences=self.num_sequences,
            max_sequences=self.max_sequences(has_device=has_device),
            memory_limits=memory_limits,
        )

    def check(self, shape: ModelConfig, model: str) -> None:
        """Raises: ConfigError if a request would be longer than the model's context, or nothing is generated."""
        if shape.is_encoder_only:
            raise ConfigError(
                f"{model} is an encoder, which generates nothing: there are no tokens a second to plan for. "
                "`moeflow serve` plans its memory as it starts"
            )
        workload = self.workload
        if workload.max_tokens > shape.max_position:
            raise ConfigError(
                f"a prompt of {workload.max_prompt_len} tokens and an answer of {workload.gen_len} are "
                f"{workload.max_tokens} in total, but {model} was made for {shape.max_position} at most. "
                "Plan for shorter prompts (--prompt-len, --prompts) or answers (--gen-len)"
            )

    def blocks_to_reserve(self, max_num_seqs: int) -> int:
        """Return how many blocks the KV cache must have for so many concurrent requests."""
        return max_num_seqs * ceil(self.workload.max_tokens / BLOCK_SIZE) if self.reserves_kv else 0

    def within(self, max_tokens: int) -> Usage:
        """Return the same with requests of at most so many tokens, prompt and answer combined."""
        workload = self.workload
        if workload.max_tokens <= max_tokens:
            return self
        prompt_len = max(min(workload.prompt_len, max_tokens // 2), 1)
        gen_len = max(min(workload.gen_len, max_tokens - prompt_len), 1)
        shorter = replace(workload, prompt_len=prompt_len, max_prompt_len=prompt_len, gen_len=gen_len)
        return replace(self, workload=shorter)


SERVING: Final = Usage(is_interactive=True)
CONVERSATION: Final = Usage(goal="latency", num_sequences=1, is_interactive=True)
OFFLINE: Final = Usage()
BYTES_PER_TOKEN: Final = 4  # of English text, where no tokenizer is loaded yet


def requests_of(prompt_bytes: Sequence[int], max_tokens: int) -> Usage:
    """Return a usage for offline prompts of these sizes, each answered with up to so many tokens."""
    lengths = [max(size // BYTES_PER_TOKEN, 1) for size in prompt_bytes]
    return Usage(workload=average_workload(lengths, [max_tokens] * len(lengths)), num_requests=len(lengths))


def average_workload(prompt_lens: Sequence[int], gen_lens: Sequence[int], rate: float = 0.0) -> Workload:
    """Return the workload of requests of these lengths, in tokens; there is at least one."""
    return Workload(
        prompt_len=max(round(sum(prompt_lens) / len(prompt_lens)), 1),
        gen_len=max(round(sum(gen_lens) / len(gen_lens)), 1),
        max_prompt_len=max(prompt_lens),
        rate=rate,
    )
