"""The memory of recurrent states: how many are kept, and how often a prefix has one."""

from __future__ import annotations

from typing import Final

from moeflow.core.engine_config import BLOCK_SIZE, StateSlotsConfig
from moeflow.core.errors import CapacityError
from moeflow.core.model_config import ModelConfig
from moeflow.core.units import format_bytes
from moeflow.planner.choices.processor_choice import Reasons

STATES_SHARE: Final = 1 / 8  # of an engine's memory, at most
_SLOTS_PER_REQUEST: Final = 4  # the request's own, and those of prefixes, where these are shared
_MIN_SLOTS: Final = 2  # a request's, and the checkpoint that it starts from
_MIN_EVERY: Final = 8  # blocks between two checkpoints of a prefix
_MAX_EVERY: Final = 64


def num_state_slots(shape: ModelConfig, max_num_seqs: int, free_bytes: int, *, shares_prefixes: bool = True) -> int:
    """Return how many states are kept, of requests and prefixes, in an engine that may take so much memory.

    Raises: CapacityError if that is not enough for one request.
    """
    if shape.recurrent is None:
        return 0
    most = int(free_bytes * STATES_SHARE) // shape.state_bytes
    if most < _MIN_SLOTS:
        raise CapacityError(
            f"a request's recurrent state takes {format_bytes(shape.state_bytes)}, and {_MIN_SLOTS} have to fit into "
            f"{STATES_SHARE:.0%} of the memory, {format_bytes(free_bytes)}: free or allow more (--memory)"
        )
    return min(max((_SLOTS_PER_REQUEST if shares_prefixes else 1) * max_num_seqs, _MIN_SLOTS), most)


def choose_states(shape: ModelConfig, num_slots: int, reasons: Reasons) -> StateSlotsConfig | None:
    """Return how states are kept; None: the model has none."""
    if shape.recurrent is None:
        return None
    every = _checkpoint_every(shape)
    held = format_bytes(num_slots * shape.state_bytes)
    reasons.append(
        ("states", f"{num_slots} of requests and prefixes in {held}; a prefix's every {every} tokens, from where it is")
    )
    return StateSlotsConfig(num_slots=num_slots, checkpoint_every=every)


def _checkpoint_every(shape: ModelConfig) -> int:
    """Return the number of tokens between kept states, where a prefix can resume. The keys and values of so many tokens
    take about as much memory as the state.
    """
    block_bytes = max(shape.kv_bytes_per_token("float32") * BLOCK_SIZE, 1)
    num_blocks = _MIN_EVERY
    while num_blocks < _MAX_EVERY and num_blocks * block_bytes < shape.state_bytes:
        num_blocks *= 2
    return num_blocks * BLOCK_SIZE
