"""The tokens of one pass: in essence {request: number of tokens}.

Prefill, a chunk of prefill, decode and (later) speculation are one case: some tokens of a request, from
a position on. Tokens of all requests are concatenated without padding in the order of `entries`.
"""

from __future__ import annotations

from dataclasses import dataclass

from moeflow.core.request import Request


@dataclass(frozen=True, slots=True)
class BatchEntry:
    """One request's share of a pass."""

    request: Request
    start: int  # position of its first token in this pass
    num_tokens: int  # how many tokens from there
    block_ids: tuple[int, ...]  # KV blocks that hold positions [0, start + num_tokens)
    samples: bool  # whether the last token's logits choose a next token

    @property
    def stop(self) -> int:
        """One past the last position of this pass: the context length its last token sees."""
        return self.start + self.num_tokens

    @property
    def num_scored(self) -> int:
        """How many tokens, the first ones, precede prompt tokens whose log-probabilities are asked for."""
        request = self.request
        if request.sampling.prompt_logprobs is None or request.output_token_ids:
            return 0
        return max(min(self.stop, len(request.prompt_token_ids) - 1) - self.start, 0)  # the last predicts the output


@dataclass(frozen=True, slots=True)
class Batch:
    """What one pass computes."""

    entries: tuple[BatchEntry, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens in the pass, over all requests."""
        return sum(entry.num_tokens for entry in self.entries)

    def __bool__(self) -> bool:
        return bool(self.entries)
