"""The kernel of linear recurrences, as it is compiled for Qwen3-Next and for Granite 4."""

from typing import Any

from moeflow.kernels.triton.recurrence import recurrence_kernel
from tests.kernels.triton.ahead_of_time import Case

PARTS = ("queries_ptr", "keys_ptr", "values_ptr", "steps_ptr", "rates_ptr", "out_ptr")
WEIGHTS = ("step_bias_ptr", "log_decay_ptr", "skip_ptr", "slots_ptr")
TABLE = ("sequences_ptr", "stores_ptr")
STRIDES = ("row_stride", "gate_stride", "slot_stride")
SIGNATURE = {
    **dict.fromkeys(PARTS, "*bf16"),
    **dict.fromkeys(WEIGHTS, "*fp32"),
    **dict.fromkeys(TABLE, "*i32"),
    **dict.fromkeys((*STRIDES, "num_sequences", "num_stores"), "i32"),
    **dict.fromkeys(("norm_eps", "query_scale", "least_step", "most_step"), "fp32"),
}


def _case(name: str, **constants: Any) -> Case:
    sizes = {"key_dim": 128, "key_block": 128, "value_block": 16}
    aligned = (*PARTS, *WEIGHTS, *TABLE, *STRIDES)
    return Case(name, recurrence_kernel, SIGNATURE, sizes | constants, aligned, options={"num_warps": 1})


CASES = [
    _case(
        "gated delta rule",
        num_heads=32,
        num_key_heads=16,
        value_dim=128,
        takes_turns=False,
        is_delta=True,
        has_norm=True,
        has_rates=True,
        has_skip=False,
    ),
    _case(
        "Mamba2",
        num_heads=64,
        num_key_heads=1,
        value_dim=64,
        takes_turns=False,
        is_delta=False,
        has_norm=False,
        has_rates=False,
        has_skip=True,
    ),
]
