"""Finds the best policy for a goal: for a device by a mixed-integer programme, without one by trials.

A device that holds the model keeps it. A smaller one holds some experts, while the host computes the others. For
latency under a rate of arrivals, the policy has the fewest sequences that keep up with the rate.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import Final

from moeflow.core.errors import CapacityError
from moeflow.core.plan import Policy
from moeflow.kernels.on_demand import on_demand
from moeflow.planner.costs.cost_model import CostModel
from moeflow.planner.search.host_search import search_host
from moeflow.planner.search.objective import FINE, Objective, cost_per_token
from moeflow.planner.search.resident_search import ENOUGH_FASTER, no_room, search_resident

with on_demand(__name__):
    from moeflow.planner.costs import hybrid_costs
    from moeflow.planner.search import hybrid_search

_HOST_FINENESS: Final = 10.0  # a host's policy costs one prediction, so its grid is finer


def search(model: CostModel, objective: Objective, ratio: float = FINE) -> tuple[CostModel, Policy]:
    """Return the best policy, and the costs that it was found with: of one device, as an engine runs on one.

    Main memory has as many slots for experts as fit, where the host computes experts beside the device.


    `ratio`: FINE finds the best, COARSE is good enough to compare machines.
    Raises: CapacityError if nothing fits, or the rate cannot be reached; ConfigError if time ran out.
    """
    alone = replace(model, num_devices=1)
    if model.has_device and isinstance(alone, hybrid_costs.HybridCosts):
        alone = hybrid_search.with_host_slots(alone, objective)
    return alone, _for_rate(alone, objective, ratio)


def search_policy(model: CostModel, objective: Objective, ratio: float = FINE) -> Policy:
    """Return the best policy for the devices that `model` has, whatever the rate of arrivals.

    Raises: CapacityError if none fits; ConfigError if time ran out.
    """
    if not model.has_device:
        return search_host(model, objective, 1 + (ratio - 1) / _HOST_FINENESS)
    from moeflow.planner.search.milp import search_device  # the solver's import is slow

    return search_device(model, objective, ratio)


def _kept_first(model: CostModel, objective: Objective, ratio: float) -> Policy:
    """Return the best policy that copies no weights for each step, unless a pipeline promises far more.

    The device holds the model, or else some of its experts while the host computes the others.
    Raises: as `search_policy`.
    """
    kept = None
    if model.has_device:
        kept = search_resident(model, objective, ratio) or hybrid_search.search_hybrid(model, objective, ratio)
    if model.has_device and not objective.can_stream:
        if kept is None:
            raise (
                hybrid_search.no_hybrid_room(model, objective)
                if isinstance(model, hybrid_costs.HybridCosts)
                else no_room(model, objective)
            )
        return kept
    try:
        streamed = search_policy(model, objective, ratio)
    except CapacityError:
        if kept is None:
            raise
        return kept
    if kept is None:
        return streamed
    goal = "latency" if objective.goal == "latency" else "throughput"
    costs = {policy: cost_per_token(model, policy, goal) for policy in (kept, streamed)}
    return kept if costs[kept] <= ENOUGH_FASTER * costs[streamed] else streamed


def _for_rate(model: CostModel, objective: Objective, ratio: float) -> Policy:
    """Return the best policy; for latency under a rate of arrivals, with the fewest sequences that keep up with it."""
    rate = model.workload.rate
    if objective.goal != "latency" or not rate or objective.num_sequences is not None:
        only_one = objective.goal == "latency" and objective.num_sequences is None
        return _kept_first(model, replace(objective, num_sequences=1) if only_one else objective, ratio)
    num_sequences, best = 1, 0.0
    while num_sequences <= objective.max_sequences:
        try:
            policy = _kept_first(model, replace(objective, num_sequences=num_sequences), ratio)
        except CapacityError:
            if not best:
                raise
            break
        served = model.predict(policy).tokens_per_s / model.workload.gen_len
        if served >= rate:
            return policy
        best, num_sequences = max(best, served), ceil(num_sequences * 1.5)
    raise too_slow(rate, best)


def too_slow(rate: float, best: float) -> CapacityError:
    """Return the error for requests that arrive faster than any plan answers them."""
    return CapacityError(
        f"{rate:g} requests a second are wanted, but this machine answers {best:.3g}. Take shorter prompts or "
        "answers, a smaller weight format (--quantize), a smaller model or a faster machine"
    )
