"""What goes in and out of an engine, in its own process or another's: plain data, token ids only.

These carry the six words everything above speaks to an engine: submit, cancel, stream (the outputs),
stats (which ride on the outputs), look, shutdown.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

import msgspec

from moeflow.core.pooling_params import PoolingParams
from moeflow.core.request import FinishReason
from moeflow.core.sampling_params import SamplingParams
from moeflow.core.token_choice import TokenChoice
from moeflow.core.trial import GainTrial


class EncoderInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of a model with an encoder's input as prompt."""

    decoder_start_token_id: int  # what the decoder begins with
    block_size: int  # inputs are filled up to a multiple of that
    max_input_tokens: int  # that one pass takes


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a client must know of the model behind an engine."""

    name: str
    path: str
    model_type: str
    vocab_size: int
    max_model_len: int  # prompt and output tokens of one request at most
    max_num_seqs: int
    eos_token_ids: tuple[int, ...]
    num_layers: int  # of what generates; 0: nothing does
    hidden_size: int
    num_experts: int  # 0: dense
    top_k: int
    num_parameters: int
    num_active_parameters: int
    weight_format: str  # of matrices: a `WeightFormat`
    device: str
    kv_capacity_tokens: int
    created: int  # unix seconds at which it was loaded
    speculators: tuple[str, ...] = ()  # that draft tokens
    encoder: EncoderInfo | None = None  # None: decoder-only
    labels: tuple[str, ...] = ()  # of the classes that it sorts texts into
    lossy_top_k: int = 0  # experts of a token that a network chooses; 0: the routers choose
    pooling: PoolingParams | None = PoolingParams()  # that its files ask for; None: not available here
    sampling_defaults: TokenChoice = TokenChoice()  # of requests that leave these fields open


NO_TOKENS: Final = SamplingParams(max_tokens=0)


class Submission(msgspec.Struct, frozen=True, tag="submit"):
    """One sequence to generate, or a prompt to make a vector of. `n` and `stop` are the caller's business.

    A request of a dead engine continues in another: earlier outputs are in `generated_token_ids`, and new outputs
    follow them.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    seed: int  # concrete; differs among the n completions of one prompt
    is_batch: bool = False  # of a batch job: takes what interactive requests leave
    generated_token_ids: list[int] = []
    isolated_until: int = 0  # output tokens: up to there it has passes of its own, since it may have ended an engine
    pooling: PoolingParams | None = None  # generate nothing, return a vector; `sampling` is then `NO_TOKENS`


class Cancellation(msgspec.Struct, frozen=True, tag="cancel"):
    """End these requests now; unknown ids are ignored, since they may just have finished."""

    request_ids: list[str]


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Accept nothing more, finish what runs within the deadline, cancel the rest, exit."""

    deadline_s: float


class Look(msgspec.Struct, frozen=True, tag="look"):
    """Answer a question between two passes."""

    number: int  # of the question, counted by the client
    question: bytes  # a `Question` of core/observation.py in msgpack; that module is loaded with the first one


ToEngine = Submission | Cancellation | Shutdown | Look


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities at one position, of the distribution before temperature and penalties."""

    token_id: int
    logprob: float
    rank: int  # 1: the likeliest
    top: list[tuple[int, float]]  # (token id, logprob), likeliest first


MAX_DRAFTED_TOKENS: Final = 16_384  # of a sequence that are kept or named; further trees are left out


class DraftedTree(msgspec.Struct, frozen=True):
    """The drafted tokens that a pass computed for one request, each after the one that it follows."""

    token_ids: list[int]
    parents: list[int]  # of each token: the place of another one, or `ROOT` of core/token_tree.py
    speculators: list[list[str]]  # of each token: its speculators
    chances: list[float]  # of each token: that it is right, and all before it, as was expected before the pass
    accepted: list[int]  # places of the output's first tokens, one after another


class PromptProgress(msgspec.Struct, frozen=True):
    """How far a prompt is computed."""

    num_tokens: int
    num_cached_tokens: int  # found in the prefix tree
    num_computed_tokens: int  # cached ones included
    elapsed_s: float  # since the first pass with the prompt began


class TokenOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one pass brought for one request. Fields without news take no bytes: most outputs are one token."""

    request_id: str
    token_ids: list[int] = []  # new ones; a stop token is included
    logprobs: list[TokenLogprobs] | None = None  # one per new token, when asked for
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # once, with the first output; [0] is None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the token that ended it, unless it was the model's EOS
    num_cached_tokens: int = 0  # prompt tokens that the prefix tree saved
    num_drafted_tokens: int = 0  # drafts that the pass computed; the new tokens except the last were among them
    drafted_tree: DraftedTree | None = None  # these drafts, if there were any and they are requested
    queued_s: float | None = None  # waited before its first pass; with the first output
    # A vector, or probabilities of classes, float32, little-endian: with the last output of a request with `pooling`.
    embedding: bytes | None = None
    prompt_progress: PromptProgress | None = None  # if asked for, in outputs of their own before the first token
    error: str | None = None  # with FinishReason.ERROR
    blames_request: bool = False  # with an error: the request asks for something that cannot be


class RankStats(msgspec.Struct, frozen=True, kw_only=True):
    """What one of the processes that share a model has to do."""

    host: str = ""  # address of its machine; empty: that of the first rank
    first_layer: int = 0
    num_layers: int = 0  # from this one on, that it has a part of
    busy_s_total: float = 0.0  # in passes, without
    waited_s_total: float  # for other ranks, with what copying takes
    is_slow: bool = False  # the others wait for it most of the time
    num_experts: int = 0  # whole ones, of all layers, replicas included
    tokens_per_pass: float = 0.0  # that these got lately, the mean of layers


class LenderStats(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine has that lends memory for experts."""

    address: str
    state: str  # "connected", or why not
    num_experts: int = 0  # that it has


class SpeculatorStats(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of one speculator's drafts; a token drafted by several counts for each."""

    name: str
    is_resting: bool = False  # it drafts to be tried at most: drafts do not pay, or it has failed
    drafted_total: list[int]  # computed, by depth, from 1 on
    accepted_total: list[int]  # of these
    drafting_s_total: float = 0.0  # of drafting


class TrialStats(msgspec.Struct, frozen=True, kw_only=True):
    """The trial of a helper that may make passes faster."""

    name: str
    is_on: bool = False  # the decision; until there is one, single passes try it
    reason: str = ""  # the measured difference, or the cause that nothing was measured


def trial_stats(trials: Iterable[GainTrial]) -> list[TrialStats]:
    """Return the decisions of trials."""
    return [TrialStats(name=trial.name, is_on=bool(trial.verdict), reason=trial.reason) for trial in trials]


class ExpertTier(NamedTuple):
    """A kind of memory with experts."""

    name: str
    num_experts: int
    num_needed: int  # by passes, found there


class ExpertStats(msgspec.Struct, frozen=True, kw_only=True):
    """What became of experts that come from disk or lie on ranks.

    Names ending in `_total` only grow.
    """

    memory_limit_bytes: int = 0  # for everything; of a replica, for it and its shared part; 0: none
    expert_slots: int = 0  # capacity, in experts,
    experts_in_slots: int = 0  # and the experts in use,
    experts_on_disk: int = 0  # of so many in all
    is_prefetching: bool = False  # whether a predictor may read ahead; one that does not pay is switched off
    expert_hits_total: int = 0  # needed by a pass and there
    expert_late_total: int = 0  # on their way
    expert_misses_total: int = 0  # neither
    expert_stall_s_total: float = 0.0  # passes waited for experts
    expert_demand_bytes_total: int = 0  # read because a pass needed them
    expert_prefetched_bytes_total: int = 0  # read because a predictor asked for it, of these:
    expert_used_bytes_total: int = 0  # needed later
    expert_wasted_bytes_total: int = 0  # evicted without having been needed
    experts_remote: int = 0  # that lenders have
    remote_pairs_total: int = 0  # of token and expert, that they computed
    remote_bytes_total: int = 0  # of rows and results for that
    remote_wait_s_total: float = 0.0  # passes had nothing else to do
    lenders: list[LenderStats] = []
    trials: list[TrialStats] = []  # of prefetches, drafts and remote experts
    ranks: list[RankStats] = []  # empty: one process has the whole model
    rank_imbalance: float = 0.0  # tokens of the fullest rank over the mean, the mean of layers; 1: all alike
    # Of experts from a rank to another, to its further homes, or away from these; or to a GPU's slot.
    expert_moves_total: int = 0
    expert_choices_total: int = 0  # of tokens and their experts, by passes with a limit (--capacity-factor)
    dropped_choices_total: int = 0  # of these, beyond the limit
    experts_on_gpu: int = 0  # slots of a model that shares its experts between a GPU and the CPU
    gpu_hits_total: int = 0  # experts that a pass needed and the GPU had
    gpu_pairs_total: int = 0  # of token and expert that the GPU computed, in passes of both
    cpu_pairs_total: int = 0  # all others
    cpu_experts_s_total: float = 0.0  # the CPU computed those; the GPU waits after its own experts
    cpu_wait_s_total: float = 0.0  # the CPU waited for the GPU
    streamed_passes_total: int = 0  # of long prompts, whose experts were copied to the GPU

    @property
    def expert_tiers(self) -> list[ExpertTier]:
        """Experts in each memory, and how often passes found an expert there; the fastest memory comes first."""
        found = [
            ExpertTier("the GPU", self.experts_on_gpu, self.gpu_hits_total),
            ExpertTier("main memory", self.experts_in_slots, self.expert_hits_total),
            ExpertTier("disk", self.experts_on_disk, self.expert_late_total + self.expert_misses_total),
        ]
        return [tier for tier in found if tier.num_experts or tier.num_needed]

    @property
    def gpu_share(self) -> float:
        """Share of those pairs that the GPU computed; 0 before the first."""
        return self.gpu_pairs_total / max(self.gpu_pairs_total + self.cpu_pairs_total, 1)

    @property
    def expert_hit_rate(self) -> float:
        """Share of the needed experts that were there; 0 before the first."""
        needed = self.expert_hits_total + self.expert_late_total + self.expert_misses_total
        return self.expert_hits_total / max(needed, 1)


class EngineStats(ExpertStats, frozen=True, kw_only=True, omit_defaults=True):
    """A snapshot. Names ending in `_total` only grow."""

    num_waiting: int = 0
    num_running: int = 0
    num_batch_waiting: int = 0  # of these, requests of batch jobs
    num_batch_running: int = 0
    kv_blocks_total: int = 0
    kv_blocks_used: int = 0  # held by running requests
    kv_blocks_cached: int = 0  # held by the prefix tree alone: free on demand
    passes_total: int = 0
    failed_passes_total: int = 0
    prompt_tokens_total: int = 0  # computed, not those found in the prefix tree
    prefix_hit_tokens_total: int = 0
    prompt_cache_limit_bytes: int = 0  # of the prompt cache on disk; 0: there is none
    prompt_cache_bytes: int = 0  # that it has, of all models and engines that share its folder
    is_prompt_cache_writing: bool = False  # else there is none, or its disk has refused
    prompt_cache_hit_tokens_total: int = 0  # whose keys and values were read from there
    prompt_cache_read_bytes_total: int = 0
    prompt_cache_written_bytes_total: int = 0
    generated_tokens_total: int = 0
    requests_finished_total: int = 0
    requests_cancelled_total: int = 0
    preemptions_total: int = 0
    tokens_per_second: float = 0.0  # generated, over the last few seconds
    speculated_passes_total: int = 0  # with drafts
    drafted_tokens_total: int = 0  # drafted tokens that were computed
    accepted_tokens_total: int = 0  # so many were right
    drafting_s_total: float = 0.0  # that drafting took
    trees_total: list[int] = []  # of drafts for one request in one pass, by number of accepted tokens, from 0 on
    speculators: list[SpeculatorStats] = []
    engine_restarts_total: int = 0  # by the supervisor, which fills in these two
    is_engine_stalled: bool = False


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    """The results of one pass, with stats as of its end."""

    outputs: list[TokenOutput]
    stats: EngineStats


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    """How far loading the weights has come."""

    bytes_done: int
    bytes_total: int


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The model is loaded; requests may come."""

    model: ModelInfo
    stats: EngineStats


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine cannot start or cannot go on. `kind` is the error class's name."""

    kind: str
    message: str
    is_from_outside: bool = False  # see `EngineError`


class Stopped(msgspec.Struct, frozen=True, tag="stopped"):
    """The engine has shut down in order."""


class Seen(msgspec.Struct, frozen=True, tag="seen"):
    """The answer to a `Look`."""

    number: int  # that of the question
    sight: bytes = b""  # a `Sight` of core/observation.py in msgpack; empty: there is an error
    error: str = ""


FromEngine = Loading | Ready | Outputs | Seen | Failed | Stopped
