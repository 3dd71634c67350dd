"""How many requests run concurrently and how many tokens a pass has, on a host whose speed is known.

Offline work takes what brings most tokens a second. For interactive work, a pass over a long prompt must not delay the
others for long. A step of all requests must not be much slower than a step of one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from moeflow.core.errors import CapacityError
from moeflow.core.plan import Workload
from moeflow.planner.choices.processor_choice import Reasons
from moeflow.planner.costs.cost_model import CostModel
from moeflow.planner.search.host_search import host_policy, largest_batch
from moeflow.planner.search.objective import COARSE, WHY_SO_MANY, Objective, cost_per_token
from moeflow.planner.search.search import search
from moeflow.planner.usage import Usage

DEFAULT_MAX_NUM_SEQS: Final = 32
DEFAULT_MAX_NUM_BATCHED_TOKENS: Final = 512  # about a second on two CPU cores: as long as decodes wait for a prefill
DISK_NUM_BATCHED_TOKENS: Final = (2048, 1024)  # where a pass reads most of the model: the first that fits
PAUSE_S: Final = 1.0  # that a pass over a prompt may take while others decode
INTERACTIVE_TOKENS: Final = (2048, 1024, 512, 256)  # of a pass, the most first
STEP_S: Final = 0.25  # between two tokens of a request: about as fast as people read,
MAX_SLOWDOWN: Final = 4.0  # or, where one alone is slower than that, so many times what that takes
TOGETHER: Final = (256, 192, 128, 96, 64, 48, 32, 24, 16, 12)  # requests, the most first
MIN_TOGETHER: Final = 8
LEAST_TOKENS: Final = DEFAULT_MAX_NUM_BATCHED_TOKENS  # of a pass, while the number of requests is chosen
TIE: Final = 1e-3  # weight of a second until the first token, relative to the goal


@dataclass(frozen=True, slots=True)
class Batching:
    """The choice and its reason."""

    max_num_seqs: int
    max_num_batched_tokens: int
    why_seqs: str = ""  # empty: the user set it
    why_tokens: str = ""

    def reasons(self) -> Reasons:
        """Return the choices that were made here, each with its reason."""
        whys = (
            ("max_num_seqs", self.max_num_seqs, self.why_seqs),
            ("max_num_batched_tokens", self.max_num_batched_tokens, self.why_tokens),
        )
        return [(name, f"{value}: {why}") for name, value, why in whys if why]


def choose_batching(
    usage: Usage,
    objective: Objective,
    costs: Callable[[int], CostModel],
    *,
    max_num_seqs: int | None,
    max_num_batched_tokens: int | None,
    streams_experts: bool = False,
) -> Batching:
    """Return the batching that suits the usage. `costs` are those of passes of so many tokens; the user set the rest.

    `streams_experts`: some come from disk. Interactive requests beyond a few would then displace experts.
    Raises: CapacityError if not even one sequence fits.
    """
    if max_num_seqs is not None:
        objective = replace(objective, max_sequences=min(max_num_seqs, objective.max_sequences))
    elif streams_experts and usage.is_interactive:
        objective = replace(objective, max_sequences=min(MIN_TOGETHER, objective.most))
    tokens, why_tokens = max_num_batched_tokens, ""
    if tokens is None:
        tokens, why_tokens = choose_num_batched_tokens(usage, objective, costs)
    if max_num_seqs is None:
        choose = _together if usage.is_interactive else _best
        least = tokens if streams_experts else LEAST_TOKENS
        number, why_seqs = choose(costs(min(tokens, max_num_batched_tokens or least)), objective)
    else:
        number, why_seqs = max_num_seqs, ""
    if max_num_batched_tokens is None:
        tokens = max(_fitting_tokens(tokens, number, objective, costs), number)
    return Batching(number, max(tokens, max_num_seqs or 0), why_seqs, why_tokens)


def _fitting_tokens(tokens: int, number: int, objective: Objective, costs: Callable[[int], CostModel]) -> int:
    """Return so many tokens a pass, or fewer if a number of requests does not fit beside them."""
    while tokens > LEAST_TOKENS and host_policy(costs(tokens), objective, number) is None:
        tokens //= 2
    return tokens


def _best(model: CostModel, objective: Objective) -> tuple[int, str]:
    _, policy = search(model, objective)
    return policy.batch_size, WHY_SO_MANY[objective.goal]


def _together(model: CostModel, objective: Objective) -> tuple[int, str]:
    least = max(min(MIN_TOGETHER, largest_batch(model, objective)), 1)
    return together(lambda number: _step_s(model, objective, number), objective, least)


def together(step_s: Callable[[int], float], objective: Objective, least: int) -> tuple[int, str]:
    """Return how many requests people may send at once before each becomes too slow to read along; `least` may.

    `step_s` returns the seconds of a step with so many; infinity: they do not fit.
    """
    if objective.num_sequences is not None:
        return objective.num_sequences, "as many as there are"
    limit_s = max(STEP_S, MAX_SLOWDOWN * step_s(1))
    most = next((it for it in TOGETHER if it <= objective.most and step_s(it) <= limit_s), least)
    each = 1 / step_s(most)
    return most, f"each then gets {each:.2g} tokens/s" if each else "more have no room"


def _step_s(model: CostModel, objective: Objective, number: int) -> float:
    policy = host_policy(model, objective, number)
    return model.predict(policy).decode_s if policy is not None else float("inf")


def choose_num_batched_tokens(usage: Usage, objective: Objective, costs: Callable[[int], CostModel]) -> tuple[int, str]:
    """Return how many tokens a pass has, and why. Raises: CapacityError if not even one sequence fits."""
    default = costs(DEFAULT_MAX_NUM_BATCHED_TOKENS)
    streams = host_policy(default, objective, objective.num_sequences or 1)
    if streams is None or streams.experts_on_disk:
        return _cheapest(objective, costs), "long prompts read experts from disk once a pass"
    if not usage.is_interactive:
        return DEFAULT_MAX_NUM_BATCHED_TOKENS, "more bring nothing where all weights are in memory"
    for tokens in INTERACTIVE_TOKENS:
        seconds = _prompt_s(costs(tokens), objective, tokens)
        if seconds <= PAUSE_S or tokens == INTERACTIVE_TOKENS[-1]:
            return tokens, f"a pass over a prompt takes {seconds:.2g} s"
    raise AssertionError("the last is taken")


def _prompt_s(model: CostModel, objective: Objective, num_tokens: int) -> float:
    """Return how long a pass over a prompt of so many tokens takes."""
    workload = Workload(prompt_len=num_tokens, gen_len=1, max_prompt_len=num_tokens)
    policy = host_policy(model, objective, 1)
    return replace(model, workload=workload).predict(policy).first_token_s if policy else float("inf")


def _cheapest(objective: Objective, costs: Callable[[int], CostModel]) -> int:
    """Return so many tokens a pass as are best for the goal.

    A larger pass leaves less memory for experts.
    """
    found = []
    for tokens in (DEFAULT_MAX_NUM_BATCHED_TOKENS, *DISK_NUM_BATCHED_TOKENS):
        model = costs(tokens)
        try:
            _, policy = search(model, objective, COARSE)
        except CapacityError:
            continue
        first_s = model.predict(policy).first_token_s
        found.append((cost_per_token(model, policy, objective.goal) + first_s * TIE, tokens))
    if not found:
        search(costs(DEFAULT_MAX_NUM_BATCHED_TOKENS), objective, COARSE)  # raises the missing limit's error
    return min(found)[1]
