"""How many requests run concurrently on a GPU, and how many tokens a pass has: what memory and speed allow."""

from __future__ import annotations

from dataclasses import replace
from typing import Final, Protocol

import msgspec

from moeflow.core.engine_config import BLOCK_SIZE
from moeflow.core.plan import Workload
from moeflow.planner.choices.batching_choice import MIN_TOGETHER, PAUSE_S, TOGETHER, Batching, together
from moeflow.planner.choices.kv_cache_choice import KV_SHARE
from moeflow.planner.costs.cost_model import CostModel
from moeflow.planner.costs.gpu_work_space import pass_bytes
from moeflow.planner.costs.hybrid_costs import CHUNK_TOKENS
from moeflow.planner.costs.model_costs import ModelCosts
from moeflow.planner.search.objective import Objective
from moeflow.planner.search.resident_search import resident_policy
from moeflow.planner.usage import Usage
from moeflow.settings.settings import Settings

_PASS_TOKENS: Final = (CHUNK_TOKENS, 4096, 8192)
_GAIN: Final = 1.1  # in prompt tokens a second, for which a pass has twice as many
_PASS_SHARE: Final = 1 / 8  # of the memory that weights leave, for one pass


class GpuSpeed(Protocol):
    """The speed of a GPU with a model."""

    def step_s(self, number: int) -> float:
        """Return the seconds of a step of so many requests; infinity: they do not fit."""

    def pass_s(self, num_tokens: int) -> float:
        """Return the seconds of a pass over a prompt of so many tokens."""


class SpareMemory(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU's memory for requests and passes."""

    left_bytes: float  # by weights that must be there
    kv_bytes: float  # the part for keys and values
    request_bytes: float
    pass_bytes: float  # of a token

    @classmethod
    def of(cls, left_bytes: float, costs: ModelCosts, settings: Settings, workload: Workload) -> SpareMemory:
        """Return the memory for requests like the workload's, where the weights leave `left_bytes`."""
        tokens = -(-workload.max_tokens // BLOCK_SIZE) * BLOCK_SIZE
        sampled_bytes = pass_bytes(costs, num_tokens=0, num_sampled=1)
        return cls(
            left_bytes=left_bytes,
            kv_bytes=settings.kv_cache_bytes or KV_SHARE * left_bytes,
            request_bytes=tokens * costs.kv_bytes + costs.shape.state_bytes + sampled_bytes,
            pass_bytes=pass_bytes(costs, num_tokens=1, num_sampled=0),
        )

    def most_requests(self, default: int) -> int:
        """Return how many requests fit at once, in steps; at least `default`, since requests may be short."""
        most = self.kv_bytes / max(self.request_bytes, 1)
        return max(default, next((it for it in TOGETHER if it <= most), default))

    def has_pass(self, num_tokens: int) -> bool:
        """Return whether a pass of so many tokens takes little of the memory."""
        return num_tokens * self.pass_bytes <= _PASS_SHARE * self.left_bytes


class ResidentSpeed(msgspec.Struct, frozen=True):
    """The speed of a GPU that holds the model."""

    model: CostModel

    def step_s(self, number: int) -> float:
        """See `GpuSpeed`."""
        return self.model.predict(resident_policy(self.model, number)).decode_s

    def pass_s(self, num_tokens: int) -> float:
        """See `GpuSpeed`."""
        model = replace(self.model, workload=one_prompt(num_tokens))
        return model.predict(resident_policy(model, 1, num_tokens)).first_token_s


def one_prompt(num_tokens: int) -> Workload:
    """Return the workload of a prompt of so many tokens."""
    return Workload(prompt_len=num_tokens, gen_len=1, max_prompt_len=num_tokens)


def gpu_batching(
    default: Batching, settings: Settings, usage: Usage, spare: SpareMemory, speed: GpuSpeed | None
) -> Batching:
    """Return the batching that suits the usage. `speed` None: it is unknown."""
    found = default
    if settings.max_num_batched_tokens is None:
        tokens, why = _pass_tokens(default.max_num_batched_tokens, spare, speed, is_interactive=usage.is_interactive)
        found = replace(found, max_num_batched_tokens=tokens, why_tokens=why)
    if settings.max_num_seqs is None:
        most = spare.most_requests(default.max_num_seqs)
        number, why = _requests(usage.objective({}, has_device=True), most, speed if usage.is_interactive else None)
        found = replace(found, max_num_seqs=number, why_seqs=why)
    return replace(found, max_num_batched_tokens=max(found.max_num_batched_tokens, found.max_num_seqs))


def _requests(objective: Objective, most: int, speed: GpuSpeed | None) -> tuple[int, str]:
    objective = replace(objective, max_sequences=min(objective.most, most))
    if speed is not None:
        return together(speed.step_s, objective, min(MIN_TOGETHER, objective.most))
    return objective.most, "as many as there are" if objective.most < most else "more keys and values do not fit"


def _pass_tokens(default: int, spare: SpareMemory, speed: GpuSpeed | None, *, is_interactive: bool) -> tuple[int, str]:
    """Return the tokens of a pass: doubled while prompts become faster. Interactive passes take a second at most."""
    sizes = [it for it in _PASS_TOKENS if spare.has_pass(it)]
    if not sizes:
        return default, "more would take much of the GPU's memory"
    tokens = sizes[0]
    if speed is None:
        return tokens, "a pass reads most weights, however short it is"
    for longer in sizes[1:]:
        longer_s = speed.pass_s(longer)
        if (is_interactive and longer_s > PAUSE_S) or longer / longer_s < _GAIN * tokens / speed.pass_s(tokens):
            break
        tokens = longer
    return tokens, f"a pass over a prompt takes {speed.pass_s(tokens):.2g} s"
