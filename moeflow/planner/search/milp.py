"""Finds the best policy of a machine with a device: a mixed-integer linear programme (MILP), solved by HiGHS.

Micro-batch and number of micro-batches come from a grid, fine for small numbers, then from finer grids around the best
so far. Shares are continuous. Each choice has a binary variable z, and its shares lie between 0 and z. So the programme
is linear, and its relaxation is nearly the answer. Source: MoE-Lightning 4.2 and appendix B.2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from math import ceil
from typing import Final

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from moeflow.core.errors import ConfigError
from moeflow.core.hardware import DISK
from moeflow.core.plan import Policy
from moeflow.planner.costs.cost_model import CostModel, IntegerPolicy, LinearCost
from moeflow.planner.search.objective import (
    FINE,
    KEPT_SPEED,
    Objective,
    capacities,
    cost_per_token,
    grid,
    least,
    too_little,
)

TIME_LIMIT_S: Final = 60.0  # of one programme, which usually takes a second or two
_OUT_OF_TIME: Final = 1  # scipy's code
_FINER: Final = ((1.03, 1.5), (1.005, 1.04))  # ratio of a finer grid, and up to how far from the best so far
_MAX_MOVES: Final = 4  # of the finer grid, after a best that lies at its edge
_FEWER: Final = 1.1  # ratio of a grid for less memory,
_FAR: Final = 4.0  # and how far it reaches


def search_device(model: CostModel, objective: Objective, ratio: float) -> Policy:
    """Return the best policy; `ratio` is the step of the first grid; only a fine one is refined.

    Raises: CapacityError if none fits.
    """
    best = _solve(model, objective, _choices(objective, ratio, None))
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
    objective: Objective, ratio: float, around: IntegerPolicy | None, times: float = 1.0
) -> list[IntegerPolicy]:
    most = objective.most
    low, high = (1, most) if around is None else _about(around.micro_batch, times)
    found = []
    for mu in grid(max(low, 1), min(high, most), ratio):
        if objective.num_sequences is not None:
            counts = [-(-objective.num_sequences // mu)]
        else:
            near = (1, most // mu) if around is None else _about(around.num_micro_batches, times)
            counts = grid(max(near[0], 1), min(near[1], most // mu), ratio)
        found += [IntegerPolicy(mu, count, attends) for count in counts for attends in (False, True)]
    return found


def _beside(
    model: CostModel, objective: Objective, around: IntegerPolicy, ratio: float, times: float
) -> list[IntegerPolicy]:
    """Return a grid of choices up to so many times larger and smaller, with attention in the same place."""
    choices = _choices(objective, ratio, around, times)
    return [choice for choice in choices if choice.attention_on_device == around.attention_on_device]


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
    for choice in choices:
        programme.add(choice)
    found = programme.minimise(programme.seconds)
    if found is None:
        raise too_little(model, objective, choices)
    return found


def _min_memory(model: CostModel, objective: Objective, best: IntegerPolicy, others: Sequence[IntegerPolicy]) -> Policy:
    """Return the policy with the least memory that is nearly as fast as the best."""
    programme = _Programme(model, objective)
    smaller = [dataclasses.replace(best, micro_batch=mu) for mu in grid(1, best.micro_batch, FINE)]
    for choice in dict.fromkeys([best, *others, *smaller]):
        programme.add(choice)
    fastest = programme.minimise(programme.seconds)
    assert fastest is not None, "the best policy itself fits"
    limit = cost_per_token(model, fastest, "throughput") / KEPT_SPEED
    programme.bound(programme.seconds, limit)
    return programme.minimise(programme.memory) or fastest


class _Programme:
    """Collects variables and rows. Each choice has: z, r_w, r_c, disk, step, prefill."""

    _SHARES = ("weights", "kv", "disk")  # in the order of `LinearCost.terms`
    _STEP, _PREFILL, _NUM = len(_SHARES) + 1, len(_SHARES) + 2, len(_SHARES) + 3

    def __init__(self, model: CostModel, objective: Objective) -> None:
        self.seconds: dict[int, float] = {}  # objective: cost of each variable
        self.memory: dict[int, float] = {}
        self._model = model
        self._goal = objective.goal
        self._most = objective.num_sequences or objective.max_sequences  # the last micro-batch may be smaller
        self._capacities = capacities(model, objective.memory_limits)
        self._choices: list[IntegerPolicy] = []
        self._rows: list[tuple[dict[int, float], float]] = []  # sum of terms <= bound

    def add(self, choice: IntegerPolicy) -> None:
        """Add a choice, unless its least memory does not fit."""
        memory = self._model.memory(choice)
        if any(least(linear) > self._capacities[tier] for tier, linear in memory.items()):
            return
        z = len(self._choices) * self._NUM
        self._choices.append(choice)
        shares = {name: z + number for number, name in enumerate(self._SHARES, 1)}
        for share in shares.values():
            self._at_most({share: 1.0, z: -1.0})
        self._one_place(choice, z, shares)
        for tier, linear in memory.items():
            terms = _terms(linear, z, shares)
            for variable, factor in terms.items():
                if tier != DISK:
                    self.memory[variable] = self.memory.get(variable, 0.0) + factor / 1e9
            self._at_most(_plus({name: f / 1e9 for name, f in terms.items()}, z, -self._capacities[tier] / 1e9))
        self._times(choice, z, shares, z + self._STEP, z + self._PREFILL)

    def bound(self, terms: Mapping[int, float], limit: float) -> None:
        """Bound a sum by `limit`."""
        self._rows.append((dict(terms), limit))

    def minimise(self, objective: Mapping[int, float]) -> Policy | None:
        """Return the best policy; None if there is none. Raises: ConfigError if time ran out."""
        if not self._choices:
            return None
        num_variables = len(self._choices) * self._NUM
        is_z = np.arange(num_variables) % self._NUM == 0
        cost = np.zeros(num_variables)
        cost[list(objective)] = list(objective.values())
        upper = np.where(np.arange(num_variables) % self._NUM < self._STEP, 1.0, np.inf)
        one = LinearConstraint(csr_array(is_z.astype(float)[None]), 1.0, 1.0)
        done = milp(
            cost / max(abs(cost).max(), 1e-300),
            integrality=is_z.astype(int),
            bounds=Bounds(0.0, upper),
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
        number = int(np.argmax(done.x[is_z]))
        values = np.clip(done.x[number * self._NUM + 1 : number * self._NUM + 4], 0.0, 1.0).tolist()
        return self._policy(self._choices[number], *(round(value, 6) for value in values))

    def _policy(self, choice: IntegerPolicy, weights: float, kv: float, disk: float) -> Policy:
        return Policy(
            batch_size=min(choice.batch_size, self._most),
            micro_batch=choice.micro_batch,
            attention_on_device=choice.attention_on_device,
            ffn_on_device=True,
            weights_on_device=weights,
            kv_on_device=kv,
            experts_on_disk=disk,
            chunk_tokens=self._model.chunk_tokens,
            num_devices=self._model.num_devices,
        )

    def _one_place(self, choice: IntegerPolicy, z: int, shares: Mapping[str, int]) -> None:
        """Keep each weight either on the device or on disk, and use only places that exist."""
        has_disk = self._model.machine.has(DISK) and self._model.costs.experts_bytes > 0
        zeros = [] if has_disk else [shares["disk"]]
        if not choice.attention_on_device:
            zeros.append(shares["kv"])
        for share in zeros:
            self._at_most({share: 1.0})
        if self._model.costs.layers_bytes:
            experts = self._model.costs.experts_bytes / self._model.costs.layers_bytes
            self._at_most({shares["weights"]: 1.0, shares["disk"]: experts, z: -1.0})

    def _times(self, choice: IntegerPolicy, z: int, shares: Mapping[str, int], step: int, prefill: int) -> None:
        """Make step and prefill as long as their slowest resource, and add them to the objective."""
        gen_len, overlaps = (
            self._model.workload.gen_len,
            {step: self._model.overlap, prefill: self._model.prefill_overlap},
        )
        share = 1.0 if self._goal == "latency" else 1.0 / (min(choice.batch_size, self._most) * gen_len)
        weights = {
            step: 1.0 if self._goal == "latency" else float(gen_len - 1),
            prefill: float(self._goal != "latency"),
        }
        for variable, resources in ((step, self._model.decode(choice)), (prefill, self._model.prefill(choice))):
            overlap = overlaps[variable]
            self.seconds[variable] = weights[variable] * share * overlap
            for linear in resources.values():
                terms = _terms(linear, z, shares)
                self._at_most(_plus(terms, variable, -1.0))
                for name, factor in terms.items():
                    part = weights[variable] * share * (1 - overlap) * factor
                    self.seconds[name] = self.seconds.get(name, 0.0) + part
        # Between equals, prefer less on disk; the term is too small to change the best policy.
        self.seconds[shares["disk"]] = self.seconds.get(shares["disk"], 0.0) + 1e-9 * share

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


def _terms(linear: LinearCost, z: int, shares: Mapping[str, int]) -> dict[int, float]:
    const, *of_shares = linear.terms[: 1 + len(shares)]
    return {z: const} | dict(zip(shares.values(), of_shares, strict=True))


def _plus(terms: Mapping[int, float], name: int, factor: float) -> dict[int, float]:
    return {**terms, name: terms.get(name, 0.0) + factor}
