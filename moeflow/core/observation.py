"""Questions about an engine's passes, and its answers: plain data, as all that goes in and out of an engine.

A question also makes the engine observe its passes for the next `LEASE_S`. Without questions it observes nothing.
Arrays are bytes, little-endian, in the order of C. L are the layers with routers, E experts, K chosen ones of a token.
"""

from __future__ import annotations

from typing import Final

import msgspec

from moeflow.core.engine_messages import DraftedTree

LEASE_S: Final = 60.0  # an engine observes so long after a question
NOT_COMPUTED: Final = 65535  # in place of the number of an expert
# Memories that may have an expert, the fastest first; answers have their places here.
TIERS: Final = ("gpu", "ram", "slot", "disk", "other machine")


class Watch(msgspec.Struct, frozen=True, tag="watch"):
    """Asks for nothing: it only makes the engine observe."""


class ExpertQuestion(msgspec.Struct, frozen=True, tag="experts"):
    """Asks how many tokens each expert got, and where it is."""


class RequestQuestion(msgspec.Struct, frozen=True, tag="request"):
    """Asks for the passes and experts of one request."""

    request_id: str  # of the HTTP request, or of one of its sequences


class TokenQuestion(msgspec.Struct, frozen=True, tag="tokens"):
    """Asks for the experts of each token of one request."""

    request_id: str  # as of `RequestQuestion`


class SpeedQuestion(msgspec.Struct, frozen=True, tag="speed"):
    """Asks for the work and the time of the passes of the last minute."""


class TimelineQuestion(msgspec.Struct, frozen=True, tag="timeline"):
    """Asks which lane did what in the last passes."""

    num_passes: int  # at most


Question = (
    Watch
    | ExpertQuestion
    | RequestQuestion
    | TokenQuestion
    | SpeedQuestion
    | TimelineQuestion
)  # fmt: skip


class Watching(msgspec.Struct, frozen=True, tag="watching"):
    """The answer to `Watch`."""

    observed_s: float  # since the engine began to observe


class RoutedTokens(msgspec.Struct, frozen=True):
    """How many tokens each expert got in some passes.

    A layer's counts add up to its tokens times `top_k`.
    """

    tokens: int  # in the passes, drafted ones included
    tokens_of_layers: list[int]  # that each layer got: all, except in an encoder-decoder
    counts: bytes  # [L, E] int64


class ExpertSight(msgspec.Struct, frozen=True, tag="experts", kw_only=True):
    """The answer to `ExpertQuestion`, of the layers whose routers this engine's process sees."""

    layers: list[int]  # numbers of the layers with routers, in the order of all arrays; an encoder's come first
    num_encoder_layers: int  # of these
    num_experts: int
    top_k: int  # that a token's router chooses
    is_counting: bool  # whether passes are counted; else see `not_counted`
    counted_s: float  # since counting began
    num_passes: int  # counted
    total: RoutedTokens  # since counting began
    last_pass: RoutedTokens
    last_minute: RoutedTokens
    load_bounds: list[float]  # upper bounds of the loads counted in `loads`, but for the last, which has none
    loads: list[int]  # tokens of an expert over the layer's mean; of passes with a mean of a token or more
    residency: bytes  # [L, E] uint8: a place in `TIERS`
    hits: bytes = b""  # [L, E] int64: an expert was there when a pass needed it; empty: there is no cache
    misses: bytes = b""  # likewise: it was not there, or on its way
    read_bytes: int  # of experts, from disk, since counting began
    stall_s: float  # that passes waited for them
    not_counted: str  # missing layers or passes, and the reason; empty: none are missing


class PassSight(msgspec.Struct, frozen=True, array_like=True):
    """One pass, as one sequence had a part in it."""

    start_s: float  # since the sequence was submitted
    duration_s: float
    num_tokens: int  # of the sequence, without drafted ones
    num_pass_tokens: int  # of all sequences, with drafted ones
    is_prompt: bool  # whether prompt tokens were among its tokens
    num_drafted: int
    num_accepted: int  # of the drafted ones
    stall_s: float  # that the pass waited for experts
    read_bytes: int  # of experts, meanwhile


class SeenDrafts(msgspec.Struct, frozen=True, array_like=True):
    """The drafts of one pass for one sequence."""

    first: int  # place among the output tokens of the first one that the pass brought
    tree: DraftedTree


class SequenceSight(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence of a request, as far as it has been observed."""

    sequence_id: str
    is_running: bool
    num_prompt_tokens: int
    num_cached_tokens: int  # found in the prefix tree
    num_output_tokens: int
    queued_s: float  # waited before its first pass
    submitted_s: float  # on the engine's clock
    passes: list[PassSight]
    counts: bytes  # [L, E] int64: its tokens that each expert got, without rejected drafts; empty: forgotten
    drafts: list[msgspec.Raw]  # each a `SeenDrafts`, of passes that had any, up to `MAX_DRAFTED_TOKENS` of the sequence
    output_token_ids: list[int]  # if there are drafts


class RequestSight(msgspec.Struct, frozen=True, tag="request", kw_only=True):
    """The answer to `RequestQuestion`."""

    layers: list[int]  # as in `ExpertSight`
    num_experts: int
    sequences: list[SequenceSight]  # empty: this engine has not observed such a request, or has forgotten it


class TokenSequence(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of one sequence."""

    sequence_id: str
    num_prompt_tokens: int
    token_ids: list[int]  # prompt and output: P tokens
    # [P, L, K] uint16, `NOT_COMPUTED` where a token was not computed while the engine observed. Empty: forgotten.
    experts: bytes


class TokenSight(msgspec.Struct, frozen=True, tag="tokens", kw_only=True):
    """The answer to `TokenQuestion`."""

    layers: list[int]  # as in `ExpertSight`
    num_experts: int
    top_k: int
    sequences: list[TokenSequence]


class PassGroup(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Passes of the same size that ended within the same second: the size of each, and sums over all."""

    num_tokens: int  # of each: rows that it computed, prompts and drafts included
    num_sampled: int  # of each: rows with logits
    num_sequences: int  # of each
    age_s: float  # since the last one ended
    num_passes: int = 0
    num_generated: int = 0  # tokens that requests got
    seconds: float = 0.0  # each from the end of the pass before, or from its begin where the engine was idle
    num_seen: int = 0  # positions that rows attend to
    num_read: int = 0  # positions whose keys and values are read, once for all rows of a sequence
    stall_s: float = 0.0  # they waited for experts
    waited_s: float = 0.0  # they waited for other ranks
    read_bytes: int = 0  # experts that came from disk or from another machine
    distinct: float = 0.0  # experts of a layer that each pass used, mean of layers; the sum over counted passes
    num_counted: int = 0  # passes whose experts were counted


class FirstToken(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A request's first token."""

    age_s: float
    num_prompt_tokens: int
    num_computed_tokens: int  # of these, not found in a cache
    seconds: float  # from the begin of its first pass
    was_alone: bool  # no pass of the prompt computed another request


class SpeedSight(msgspec.Struct, frozen=True, tag="speed"):
    """The answer to `SpeedQuestion`: the last minute, the oldest first."""

    observed_s: float  # since the engine began to observe
    groups: list[PassGroup]
    first_tokens: list[FirstToken]


class TimelineSight(msgspec.Struct, frozen=True, tag="timeline"):
    """The answer to `TimelineQuestion`."""

    recording: bytes  # `Recording` of pipeline/runtime/recording.py as MessagePack; the first one has no pass


Sight = (
    Watching
    | ExpertSight
    | RequestSight
    | TokenSight
    | SpeedSight
    | TimelineSight
)  # fmt: skip
