"""The tokens of one pass: in essence {request: number of tokens}.

Prefill, a chunk of prefill and decode are one case: some tokens of a request, from a position on. A tree of drafted
tokens may follow. The tokens that the model would have chosen are kept. Tokens of all requests are
concatenated without padding in the order of `entries`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

from moeflow.core.request import Request
from moeflow.core.token_tree import NO_TREE, TokenTree

NO_SLOT: Final = -1  # of states: there is none


class StateUse(msgspec.Struct, frozen=True, array_like=True):
    """What a pass does with the recurrent state of a sequence: which slots of the state memory it reads and writes."""

    source: int  # where the state before its first token is; NO_SLOT: it is the first of all, and the state zero
    target: int  # where the state after its last token goes; may be `source`
    saves: tuple[tuple[int, int], ...] = ()  # (position, slot): where the state after so many tokens goes, too


@dataclass(frozen=True, slots=True)
class BatchEntry:
    """One request's share of a pass."""

    request: Request
    start: int  # position of its first token in this pass
    num_tokens: int  # how many tokens from there
    block_ids: tuple[int, ...]  # KV blocks that hold positions [0, start + num_rows)
    samples: bool  # whether the last token's logits choose a next token
    tree: TokenTree = NO_TREE  # drafted tokens after that token, if it samples; their logits choose the next tokens
    state: StateUse | None = None  # None: the model has no recurrent layers

    @property
    def stop(self) -> int:
        """One past the last position of the request's tokens in this pass: the context length the last of them sees."""
        return self.start + self.num_tokens

    @property
    def num_rows(self) -> int:
        """Tokens that are computed: drafted ones, too, which take the positions from `stop` on for the time being."""
        return self.num_tokens + len(self.tree.token_ids)

    @property
    def num_sampled(self) -> int:
        """How many tokens, the last ones, have their logits computed to choose what follows."""
        return 1 + len(self.tree.token_ids) if self.samples else 0

    @property
    def ends_pooling(self) -> bool:
        """Whether a prompt that is to become a vector ends with this pass."""
        return self.request.pooling is not None and self.stop == self.request.num_tokens

    @property
    def pooled(self) -> range:
        """Which of its tokens, counted from its first one, have their hidden states made into a vector."""
        pooling = self.request.pooling
        if pooling is None:
            return range(0)
        if pooling.kind == "mean":
            return range(self.num_tokens)
        if pooling.kind == "first":
            return range(1 if self.start == 0 else 0)
        return range(self.num_tokens - 1, self.num_tokens) if self.ends_pooling else range(0)

    @property
    def num_scored(self) -> int:
        """How many tokens, the first ones, precede prompt tokens whose log-probabilities are asked for."""
        request = self.request
        if request.sampling.prompt_logprobs is None or request.output_token_ids:
            return 0
        return max(min(self.stop, len(request.prompt_token_ids) - 1) - self.start, 0)  # the last predicts the output


class Batch(msgspec.Struct, frozen=True):
    """What one pass computes."""

    entries: tuple[BatchEntry, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens in the pass, over all requests, drafted ones included."""
        return sum(entry.num_rows for entry in self.entries)

    def __bool__(self) -> bool:
        return bool(self.entries)
