"""Kernels of activations and of the rotary table, as they are compiled."""

from moeflow.kernels.triton.activation import apply_and_mul_kernel
from moeflow.kernels.triton.rotary_table import rotary_table_kernel
from tests.kernels.triton.ahead_of_time import Case

CASES = [
    Case(
        f"{function}, times ups",
        apply_and_mul_kernel,
        {"gate_up_ptr": "*bf16", "out_ptr": "*bf16", "size": "i32", "stride": "i32", "alpha": "fp32", "limit": "fp32"},
        {"function": function, "block": 1024},
        aligned=("gate_up_ptr", "out_ptr", "size", "stride"),
        options={"num_warps": 4},
    )
    for function in ("silu", "gelu", "gelu_tanh", "relu", "clamped_swiglu")
] + [
    Case(
        "rotary table",
        rotary_table_kernel,
        {
            "positions_ptr": "*i64",
            "frequencies_ptr": "*fp32",
            "cos_ptr": "*bf16",
            "sin_ptr": "*bf16",
            "num_pairs": "i32",
        },
        {"scale": 1.0, "block": 64},
        aligned=("positions_ptr", "frequencies_ptr", "cos_ptr", "sin_ptr", "num_pairs"),
        options={"num_warps": 2},
        has_wide_loads=False,  # a number for each lane
    )
]
