"""The norm and product of latent attention's queries, as they are compiled for DeepSeek-V3."""

from moeflow.kernels.triton.norm_linear import norm_linear_kernel
from tests.kernels.triton.ahead_of_time import Case

POINTERS = ("x_ptr", "norm_ptr", "weight_ptr", "bias_ptr", "out_ptr")

CASES = [
    Case(
        f"deepseek-v3, norm and product of {num_rows} rows",
        norm_linear_kernel,
        dict.fromkeys(POINTERS, "*bf16") | {"num_rows": "i32", "stride": "i32", "eps": "fp32", "num_outputs": "i32"},
        {
            "size": 1536,
            "has_bias": False,
            "is_even": True,
            "block_m": max(num_rows, 16),
            "block_n": 32,
            "block_k": 128,
        },
        aligned=(*POINTERS, "stride", "num_outputs"),
        options={"num_warps": 4, "num_stages": 4},
        has_dot=True,
        capabilities=(80, 89, 90),
    )
    for num_rows in (1, 64)
]
