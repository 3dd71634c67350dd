"""The norm kernel, as it is compiled."""

from moeflow.kernels.triton.norm import norm_kernel
from tests.kernels.triton.ahead_of_time import Case

CASES = [
    Case(
        f"norm, mean {mean}, adds {adds}",
        norm_kernel,
        {
            "x_ptr": "*bf16",
            "residual_ptr": "*bf16",
            "weight_ptr": "*bf16",
            "bias_ptr": "*bf16",
            "hidden_ptr": "*bf16",
            "factor_ptr": "*bf16",
            "sum_ptr": "*bf16",
            "out_ptr": "*bf16",
            "next_weight_ptr": "*bf16",
            "next_bias_ptr": "*bf16",
            "next_ptr": "*bf16",
            "size": "i32",
            "stride": "i32",
            "eps": "fp32",
            "next_eps": "fp32",
        },
        {
            "has_residual": not adds,
            "subtracts_mean": mean,
            "has_bias": mean,
            "has_hidden": adds,
            "has_factor": adds,
            "has_next": adds,
            "block": 2048,
        },
        aligned=(
            *("x_ptr", "residual_ptr", "weight_ptr", "bias_ptr", "hidden_ptr", "sum_ptr", "out_ptr"),
            *("next_weight_ptr", "next_bias_ptr", "next_ptr"),
            *("size", "stride"),
        ),
        options={"num_warps": 4},
    )
    for mean in (False, True)
    for adds in (False, True)
]
