"""One sequence being generated, or a prompt whose hidden states are wanted, as scheduler and engine see it.

A user's request with `n` completions becomes n of these. Text is unknown here: token ids in, token ids
out. Each field names its owner, its only writer.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from moeflow.core.pooling_params import PoolingParams
from moeflow.core.sampling_params import SamplingParams
from moeflow.core.token_choice import TokenChoice
from moeflow.core.token_mask import TokenConstraint


class RequestStatus(StrEnum):
    """Where a request stands between passes."""

    WAITING = "waiting"  # in the queue: new, or preempted
    RUNNING = "running"  # holds blocks and takes part in passes
    FINISHED = "finished"


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"  # end-of-sequence token, stop token or stop string
    LENGTH = "length"  # max_tokens or the context is reached
    CANCELLED = "cancelled"
    ERROR = "error"


class Request(msgspec.Struct, eq=False):
    """State of one sequence. Identity, not value, is what compares."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    max_tokens: int  # output tokens at most: the user's limit, cut to the context; set by the engine
    stop_token_ids: frozenset[int] = frozenset()  # end it: the model's EOS (unless ignored) and the user's
    seed: int = 0  # always concrete, so that a preempted request samples the same tokens again
    is_batch: bool = False  # of a batch job: takes what interactive requests leave
    pooling: PoolingParams | None = None  # it generates nothing: its prompt becomes a vector
    isolated_until: int = 0  # output tokens: up to there it has passes of its own
    num_encoder_tokens: int = 0  # the first of the prompt, which an encoder sees; 0: there is none
    constraint: TokenConstraint | None = None  # the form that its answer must have
    num_together: int = 0  # tokens that have to be computed in one pass, the first ones; 0: any may begin it

    status: RequestStatus = RequestStatus.WAITING  # scheduler
    num_computed_tokens: int = 0  # tokens whose K and V are in the cache; scheduler
    num_cached_tokens: int = 0  # prompt tokens found in the prefix tree at first admission; scheduler
    num_preemptions: int = 0  # scheduler
    submitted_s: float = 0.0  # on the engine's clock; engine
    queued_s: float | None = None  # waited before its first pass; engine
    output_token_ids: list[int] = []  # engine: tokens of an earlier engine, then sampled ones
    finish_reason: FinishReason | None = None  # set once, at its end
    choice: TokenChoice = TokenChoice()  # from `sampling`, with the engine's defaults where that is open

    def __post_init__(self) -> None:
        self.choice = self.sampling.choice(TokenChoice())

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens that must pass through the model before the next one can be sampled."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        """Whether only the newest token is left to compute."""
        return self.num_uncomputed_tokens == 1 and bool(self.output_token_ids)

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether its result needs every prompt token. Cached tokens have keys and values only."""
        if self.pooling is not None:
            return self.pooling.needs_whole_prompt
        return self.sampling.prompt_logprobs is not None

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Return tokens [start, stop) of the prompt followed by the output."""
        num_prompt = len(self.prompt_token_ids)
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : stop - num_prompt]
        head = self.prompt_token_ids[start:stop]
        return head if stop <= num_prompt else head + self.output_token_ids[: stop - num_prompt]
