"""Finds the best policy for a device that holds the whole model, where a pass is the model's plain forward."""

from __future__ import annotations

from math import ceil
from typing import Final

from moeflow.core.errors import CapacityError
from moeflow.core.hardware import DEVICE
from moeflow.core.plan import Policy
from moeflow.core.units import format_bytes
from moeflow.planner.costs.cost_model import CostModel
from moeflow.planner.search.objective import Objective, best_of, capacities, grid

PASS_TOKENS: Final = (512, 2048, 8192)  # each pass over prompts reads all weights
ENOUGH_FASTER: Final = 2.0  # a pipeline's promise, for which it is preferred: on a GPU its lanes overlap far less


def search_resident(model: CostModel, objective: Objective, ratio: float) -> Policy | None:
    """Return the best policy; `ratio` is the step between numbers of sequences. None: the device is too small."""
    most = objective.most
    numbers = [most] if objective.num_sequences is not None else grid(1, _largest(model, objective, most), ratio)
    sizes = [(number, tokens) for number in numbers for tokens in PASS_TOKENS]
    found = [policy for size in sizes if _fits(model, objective, policy := resident_policy(model, *size))]
    return best_of(model, found, objective)


def no_room(model: CostModel, objective: Objective) -> CapacityError:
    """Return the error for a device that is too small, with the memory that the fewest sequences need."""
    need = model.memory_of(resident_policy(model, objective.num_sequences or 1))[DEVICE]
    have = capacities(model, objective.memory_limits)[DEVICE]
    return CapacityError(
        f"the model needs {format_bytes(ceil(need))} of device memory, but there are {format_bytes(have)}, and "
        "quantized weights are not streamed: use --device cpu, or remove --quantize"
    )


def resident_policy(model: CostModel, number: int, pass_tokens: int = PASS_TOKENS[0]) -> Policy:
    """Return the policy of a device with the whole model, for so many sequences."""
    return Policy(
        batch_size=number,
        micro_batch=number,
        attention_on_device=True,
        ffn_on_device=True,
        weights_on_device=1.0,
        kv_on_device=1.0,
        chunk_tokens=pass_tokens,
        num_devices=model.num_devices,
    )


def _largest(model: CostModel, objective: Objective, most: int) -> int:
    """Return the largest number of sequences that fits; 0: none does."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _fits(model, objective, resident_policy(model, middle)) else (low, middle - 1)
    return low


def _fits(model: CostModel, objective: Objective, policy: Policy) -> bool:
    have = capacities(model, objective.memory_limits)
    return all(used <= have[tier] for tier, used in model.memory_of(policy).items())
