"""The kernels of linear recurrences in chunks, as they are compiled for Qwen3-Next and for Granite 4."""

from typing import Any

from moeflow.kernels.triton.chunked_recurrence import carry_kernel, chunk_kernel
from tests.kernels.triton.ahead_of_time import Case

PARTS = ("queries_ptr", "keys_ptr", "values_ptr", "steps_ptr", "rates_ptr", "out_ptr")
FLOATS = ("step_bias_ptr", "log_decay_ptr", "skip_ptr", "slots_ptr", "solved_ptr", "seen_ptr")
TABLE = ("sequences_ptr", "stores_ptr", "chunks_ptr")
STRIDES = ("row_stride", "gate_stride", "slot_stride")
SIGNATURE = {
    **dict.fromkeys(PARTS, "*bf16"),
    **dict.fromkeys(FLOATS, "*fp32"),
    **dict.fromkeys(TABLE, "*i32"),
    **dict.fromkeys((*STRIDES, "num_sequences", "num_stores", "num_chunks"), "i32"),
    **dict.fromkeys(("norm_eps", "query_scale", "least_step", "most_step"), "fp32"),
}
QWEN3_NEXT = {
    "num_heads": 32,
    "num_key_heads": 16,
    "value_dim": 128,
    "takes_turns": False,
    "is_delta": True,
    "has_norm": True,
    "has_rates": True,
    "has_skip": False,
}
GRANITE = {
    "num_heads": 64,
    "num_key_heads": 1,
    "value_dim": 64,
    "takes_turns": False,
    "is_delta": False,
    "has_norm": False,
    "has_rates": False,
    "has_skip": True,
}


def _case(name: str, kernel: Any, **constants: Any) -> Case:
    sizes = {"key_dim": 128, "key_block": 128, "value_block": 16}
    given = {key: value for key, value in (sizes | constants).items() if key in kernel.arg_names}
    signature = {key: value for key, value in SIGNATURE.items() if key in kernel.arg_names}
    aligned = tuple(key for key in (*PARTS, *FLOATS, *TABLE, *STRIDES) if key in kernel.arg_names)
    options = {"num_warps": 2} if kernel is chunk_kernel else {"num_warps": 4, "num_stages": 2}
    return Case(name, kernel, signature, given, aligned, options, has_dot=True, capabilities=(80, 89, 90))


CASES = [
    _case("chunks, gated delta rule", chunk_kernel, **QWEN3_NEXT),
    _case("chunks, Mamba2", chunk_kernel, **GRANITE),
    _case("carried states, gated delta rule", carry_kernel, **QWEN3_NEXT),
    _case("carried states, Mamba2", carry_kernel, **GRANITE),
]
