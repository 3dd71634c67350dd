"""Finds the best policy of a machine with a device: a mixed-integer linear programme (MILP), solved by HiGHS.

Micro-batch and number of micro-batches come from a grid, fine for small numbers, then from finer grids around the best
so far. The places of attention, keys and values, and the tokens of a pass over prompts multiply these choices. Each
choice has a binary variable z and three whole numbers: a layer's experts on the device, a layer's experts for the host,
and layers whose keys and values stay on the device. A choice that is not taken has zeros. So the programme is linear,
and an engine runs each solution as it is. Source: MoE-Lightning 4.2 and appendix B.2.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Final

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from moeflow.core.errors import ConfigError
from moeflow.core.hardware import DEVICE, RAM
from moeflow.core.plan import Policy
from moeflow.planner.costs.cost_model import (
    CostModel,
    IntegerPolicy,
    LinearCost,
    Resources,
    is_bound,
)
from moeflow.planner.search.objective import (
    FINE,
    KEPT_SPEED,
    Objective,
    capacities,
    cost_per_token,
    grid,
    too_little,
)

TIME_LIMIT_S: Final = 60.0  # of one programme, which usually takes a second or two
_OUT_OF_TIME: Final = 1  # scipy's code
_FINER: Final = ((1.03, 1.5), (1.005, 1.04))  # ratio of a finer grid, and up to how far from the best so far
_MAX_MOVES: Final = 4  # of the finer grid, after a best that lies at its edge
MIN_PASS_TOKENS: Final = 256  # over prompts; also their step
_PARTS: Final = (1.0, 2.0, 4.0)  # of the pass that computes for as long as weights arrive
_FINER_PARTS: Final = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0)
_FEWER: Final = 1.1  # ratio of a grid for less memory,
_FAR: Final = 4.0  # and how far it reaches


def search_device(model: CostModel, objective: Objective, ratio: float) -> Policy:
    """Return the best policy; `ratio` is the step of the first grid; only a fine one is refined.

    Raises: CapacityError if none fits.
    """
    best = _solve(model, objective, _choices(model, objective, ratio, None))
    if ratio > FINE:
        return best
    for ratio, times in _FINER:
        best = _climb(model, objective, best, ratio, times)
    if objective.goal != "memory":
        return best
    around = IntegerPolicy.of(best)
    return _min_memory(model, objective, around, _beside(model, objective, around, _FEWER, _FAR))


def _climb(model: CostModel, objective: Objective, best: Policy, ratio: float, times: float) -> Policy:
    """Return the best of a finer grid around a policy; repeat around it if it lies at the grid's edge."""
    for _ in range(_MAX_MOVES):
        around = IntegerPolicy.of(best)
        best = _solve(model, objective, [around, *_beside(model, objective, around, ratio, times)])
        if not _is_at_edge(IntegerPolicy.of(best), around, times):
            break
    return best


def _choices(
    model: CostModel, objective: Objective, ratio: float, around: IntegerPolicy | None, times: float = 1.0
) -> list[IntegerPolicy]:
    most = objective.most
    parts = _PARTS if around is None else _FINER_PARTS
    low, high = (1, most) if around is None else _about(around.micro_batch, times)
    found = []
    for mu in grid(max(low, 1), min(high, most), ratio):
        if objective.num_sequences is not None:
            counts = [-(-objective.num_sequences // mu)]
        else:
            near = (1, most // mu) if around is None else _about(around.num_micro_batches, times)
            counts = grid(max(near[0], 1), min(near[1], most // mu), ratio)
        found += [choice for count in counts for choice in _places(model, mu, count, parts)]
    return [choice for choice in found if objective.can_host or not choice.shares_experts]


def _places(model: CostModel, micro_batch: int, count: int, parts: Sequence[float]) -> Iterator[IntegerPolicy]:
    """Yield the choices for so many micro-batches."""
    few = max(micro_batch // model.workload.prompt_len, 1)
    for prompts in sorted({few, max(few, min(model.enough_prompts, micro_batch * count))}):
        cpu = IntegerPolicy(micro_batch, count, attention_on_device=False, prompts=prompts)
        gpu = replace(cpu, attention_on_device=True)
        kinds = [cpu, gpu, replace(gpu, keeps_kv=True)]
        if model.costs.experts_bytes:
            kinds.append(replace(cpu, shares_experts=True))
        for tokens in _pass_tokens(model, cpu, parts):
            yield from (replace(kind, chunk_tokens=tokens) for kind in kinds)


def _pass_tokens(model: CostModel, choice: IntegerPolicy, parts: Sequence[float]) -> list[int]:
    """Return tokens of a pass over prompts: so many that computing takes as long as the weights, and fewer.

    More would only take memory, and the fewest take least.
    """
    least = max(choice.batch_size, MIN_PASS_TOKENS)
    all_prompts = choice.batch_size * (model.workload.prompt_len + 1)
    balanced = model.balanced_tokens(choice.prompts)
    tokens = [ceil(min(balanced, all_prompts) / part / MIN_PASS_TOKENS) * MIN_PASS_TOKENS for part in parts]
    return sorted({least, *(max(least, each) for each in tokens)})


def _beside(
    model: CostModel, objective: Objective, around: IntegerPolicy, ratio: float, times: float
) -> list[IntegerPolicy]:
    """Return a grid of choices up to so many times larger and smaller, with attention in the same place."""
    choices = _choices(model, objective, ratio, around, times)
    return [choice for choice in choices if _place(choice) == _place(around)]


def _num_sequences(objective: Objective, choice: IntegerPolicy) -> int:
    """Return the sequences of a choice, whose last micro-batch may be smaller."""
    return min(choice.batch_size, objective.num_sequences or objective.max_sequences)


def _place(choice: IntegerPolicy) -> tuple[bool, bool, bool]:
    return choice.attention_on_device, choice.keeps_kv, choice.shares_experts


def _about(number: int, times: float) -> tuple[int, int]:
    return int(number / times), ceil(number * times)


def _is_at_edge(choice: IntegerPolicy, around: IntegerPolicy, times: float) -> bool:
    """Return whether better choices may lie beyond the grid around a choice."""
    pairs = (
        (choice.micro_batch, around.micro_batch),
        (choice.num_micro_batches, around.num_micro_batches),
    )
    return any(one in _about(other, times) and one > 1 for one, other in pairs if one != other)


def _solve(model: CostModel, objective: Objective, choices: Sequence[IntegerPolicy]) -> Policy:
    programme = _Programme(model, objective)
    for choice in promising(model, objective, choices):
        programme.add(choice)
    found = programme.minimise(programme.seconds)
    if found is None:
        raise too_little(model, objective, choices)
    return found


def _min_memory(model: CostModel, objective: Objective, best: IntegerPolicy, others: Sequence[IntegerPolicy]) -> Policy:
    """Return the policy with the least memory that is nearly as fast as the best."""
    programme = _Programme(model, objective)
    smaller = [replace(best, micro_batch=mu) for mu in grid(1, best.micro_batch, FINE)]
    for choice in promising(model, objective, dict.fromkeys([best, *others, *smaller]), KEPT_SPEED):
        programme.add(choice)
    fastest = programme.minimise(programme.seconds)
    assert fastest is not None, "the best policy itself fits"
    limit = cost_per_token(model, fastest, "throughput") / KEPT_SPEED
    programme.bound(programme.seconds, limit)
    return programme.minimise(programme.memory) or fastest


@dataclass(frozen=True, slots=True)
class Phase:
    """The steps or the prefill of a choice."""

    resources: Resources
    overlap: float
    weight: float  # of a second in the objective

    def cost(self, *shares: float) -> float:
        """Return its part of the objective for shares of weights, keys and values, and the host's experts."""
        seconds = {name: max(linear.at(*shares), 0.0) for name, linear in self.resources.items()}
        return self.weight * CostModel.combine(seconds, self.overlap)


def phases(model: CostModel, objective: Objective, choice: IntegerPolicy) -> tuple[Phase, Phase]:
    """Return the decoding steps and the prefill."""
    is_latency = objective.goal == "latency"
    share = 1.0 if is_latency else 1.0 / (_num_sequences(objective, choice) * model.workload.gen_len)
    of_steps, of_prefill = (1.0, 0.0) if is_latency else (model.workload.gen_len - 1.0, 1.0)
    return (
        Phase(model.decode(choice), model.overlap, of_steps * share),
        Phase(model.prefill(choice), model.prefill_overlap, of_prefill * share),
    )


def promising(
    model: CostModel, objective: Objective, choices: Iterable[IntegerPolicy], kept: float = 1.0
) -> list[IntegerPolicy]:
    """Return the choices that fit and may be the best, or have `kept` of its speed."""
    have, lowest, best = capacities(model, objective.memory_limits), dict[IntegerPolicy, float](), inf
    for choice in choices:
        memory = model.memory(choice)
        if all(least <= have[tier] for tier, least in model.least_memory(choice, memory).items()):
            lowest[choice], reached = _bounds(model, objective, choice, memory, have)
            best = min(best, reached)
    return [choice for choice, cost in lowest.items() if cost <= best / kept * (1 + 1e-9)]


def _bounds(
    model: CostModel, objective: Objective, choice: IntegerPolicy, memory: Resources, have: Mapping[str, int]
) -> tuple[float, float]:
    """Return a cost that no shares of a choice are below, and one that some shares reach."""
    parts, num_experts, num_layers = phases(model, objective, choice), model.num_experts, model.costs.shape.num_layers

    def cost(experts: int, kv: float, hosted: int = 0) -> float:
        shares = model.resident_share(experts), kv, hosted / num_experts
        return sum(part.cost(*shares) for part in parts)

    kv, (_, of_weights, of_kv, *_) = float(choice.keeps_kv), memory[DEVICE].terms
    room = have[DEVICE] - memory[DEVICE].at(model.resident_share(0), kv)
    of_expert = of_weights * (model.resident_share(1) - model.resident_share(0))
    experts = min(int(room / of_expert), num_experts - choice.keeps_kv) if of_expert > 0 else num_experts

    def at_host(number: int) -> float:
        return cost(min(experts, num_experts - number), kv, number)

    hosted = 0
    if choice.shares_experts:
        hosted = bisect_left(range(num_experts), True, key=lambda it: at_host(it) <= at_host(it + 1))
    reached, shares = at_host(hosted), (model.resident_share(min(experts, num_experts - hosted)), kv)
    fits = memory[RAM].at(*shares) <= have[RAM]
    lowest = reached
    if choice.attention_on_device and not choice.keeps_kv:
        lowest = cost(experts, min(int(room / of_kv * num_layers), num_layers - 1) / num_layers)
    return lowest, reached if fits else inf


class _Programme:
    """Collects variables and rows. Each choice has: z, experts, KV layers, hosted experts, step, prefill."""

    _NAMES = ("weights", "kv", "hosted")  # terms of `LinearCost`, by variable
    _STEP, _PREFILL, _NUM = len(_NAMES) + 1, len(_NAMES) + 2, len(_NAMES) + 3

    def __init__(self, model: CostModel, objective: Objective) -> None:
        self.seconds: dict[int, float] = {}  # objective: cost of each variable
        self.memory: dict[int, float] = {}
        self._model = model
        self._num_layers = model.costs.shape.num_layers
        self._objective = objective
        self._capacities = capacities(model, objective.memory_limits)
        self._choices: list[IntegerPolicy] = []
        self._rows: list[tuple[dict[int, float], float]] = []  # sum of terms <= bound

    def add(self, choice: IntegerPolicy) -> None:
        """Add a choice."""
        memory = self._model.memory(choice)
        z = len(self._choices) * self._NUM
        self._choices.append(choice)
        self._limit(choice, z)
        for tier, linear in memory.items():
            terms = self._terms(linear, z)
            for variable, factor in terms.items():
                self.memory[variable] = self.memory.get(variable, 0.0) + factor / 1e9
            self._at_most(_plus({name: f / 1e9 for name, f in terms.items()}, z, -self._capacities[tier] / 1e9))
        self._times(choice, z)

    def bound(self, terms: Mapping[int, float], limit: float) -> None:
        """Bound a sum by `limit`."""
        self._rows.append((dict(terms), limit))

    def minimise(self, objective: Mapping[int, float]) -> Policy | None:
        """Return the best policy; None if there is none. Raises: ConfigError if time ran out."""
        if not self._choices:
            return None
        num_variables = len(self._choices) * self._NUM
        kinds = np.arange(num_variables) % self._NUM
        cost = np.zeros(num_variables)
        cost[list(objective)] = list(objective.values())
        one = LinearConstraint(csr_array((kinds == 0).astype(float)[None]), 1.0, 1.0)
        done = milp(
            cost / max(abs(cost).max(), 1e-300),
            integrality=(kinds < self._STEP).astype(int),
            bounds=Bounds(0.0, np.where(kinds == 0, 1.0, np.inf)),
            constraints=[one, self._constraint(num_variables)],
            options={"time_limit": TIME_LIMIT_S, "mip_rel_gap": 1e-4},
        )
        if done.x is None and done.status == _OUT_OF_TIME:
            raise ConfigError(
                f"no plan was found in {TIME_LIMIT_S:.0f} s: plan again while this machine is less busy, or fix the "
                "number of sequences per decoding step (--batch-size)"
            )
        if done.x is None:
            return None
        number = int(np.argmax(done.x[kinds == 0]))
        experts, kv_layers, hosted = np.rint(done.x[number * self._NUM + 1 : (number + 1) * self._NUM - 2]).tolist()
        return self._policy(self._choices[number], int(experts), int(kv_layers), int(hosted))

    def _policy(self, choice: IntegerPolicy, experts: int, kv_layers: int, hosted: int) -> Policy:
        return Policy(
            batch_size=_num_sequences(self._objective, choice),
            micro_batch=choice.micro_batch,
            attention_on_device=choice.attention_on_device,
            ffn_on_device=hosted < self._model.num_experts,
            weights_on_device=self._model.resident_share(experts),
            kv_on_device=kv_layers / self._num_layers,
            experts_on_host=hosted / self._model.num_experts,
            chunk_tokens=choice.chunk_tokens,
            prompts=choice.prompts,
            num_devices=self._model.num_devices,
        )

    def _limit(self, choice: IntegerPolicy, z: int) -> None:
        """Keep each expert in one place, and keys and values where the pipeline has them."""
        experts, kv_layers, hosted = range(z + 1, z + self._STEP)
        num_experts = self._model.num_experts - choice.keeps_kv  # a device that keeps all has no pipeline
        self._at_most({experts: 1.0, hosted: 1.0, z: -num_experts})
        if not choice.shares_experts:
            self._at_most({hosted: 1.0})
        layers = self._num_layers - 1 if choice.attention_on_device and not choice.keeps_kv else 0
        if choice.keeps_kv:
            self._at_most({kv_layers: -1.0, z: self._num_layers})
            layers = self._num_layers
        self._at_most({kv_layers: 1.0, z: -layers})

    def _times(self, choice: IntegerPolicy, z: int) -> None:
        """Make step and prefill as long as their slowest resource, and add them to the objective."""
        for slowest, phase in zip(
            (z + self._STEP, z + self._PREFILL), phases(self._model, self._objective, choice), strict=True
        ):
            weight, overlap = phase.weight, phase.overlap
            self.seconds[slowest] = weight * overlap
            for name, linear in phase.resources.items():
                terms = self._terms(linear, z)
                self._at_most(_plus(terms, slowest, -1.0))
                for variable, factor in terms.items() if not is_bound(name) else ():
                    self.seconds[variable] = self.seconds.get(variable, 0.0) + weight * (1 - overlap) * factor
            # Between equals, prefer experts on the device; the term is too small to change the best policy.
            self.seconds[z + 1] = self.seconds.get(z + 1, 0.0) - 1e-9 * weight

    def _terms(self, linear: LinearCost, z: int) -> dict[int, float]:
        """Return the factors of a choice's variables."""
        model = self._model
        least_share = model.resident_share(0)
        return {
            z: linear.const + linear.weights * least_share,
            z + 1: linear.weights * (1 - least_share) / model.num_experts,
            z + 2: linear.kv / self._num_layers,
            z + 3: linear.hosted / model.num_experts,
        }

    def _at_most(self, terms: Mapping[int, float]) -> None:
        self._rows.append(({name: factor for name, factor in terms.items() if factor}, 0.0))

    def _constraint(self, num_variables: int) -> LinearConstraint:
        rows: list[int] = []
        columns: list[int] = []
        factors: list[float] = []
        for number, (terms, _) in enumerate(self._rows):
            scale = max(map(abs, terms.values()), default=1.0)
            rows += [number] * len(terms)
            columns += terms.keys()
            factors += [factor / scale for factor in terms.values()]
        bounds = [limit / max(map(abs, terms.values()), default=1.0) for terms, limit in self._rows]
        shape = (len(self._rows), num_variables)
        return LinearConstraint(csr_array((factors, (rows, columns)), shape=shape), -np.inf, np.array(bounds))


def _plus(terms: Mapping[int, float], name: int, factor: float) -> dict[int, float]:
    return {**terms, name: terms.get(name, 0.0) + factor}
