"""The kernels of sampling, as they are compiled for a vocabulary of 152,064 tokens."""

from typing import Any

from moeflow.kernels.triton import draws
from moeflow.kernels.triton.greedy import greedy_kernel
from moeflow.kernels.triton.logit_edits import copy_allowed_kernel, edit_tokens_kernel
from tests.kernels.triton.ahead_of_time import Case

SIZES = ("row_stride", "vocab_size")

DRAWS = {
    **dict.fromkeys(("logits_ptr", "maxima_ptr"), "*fp32"),
    **dict.fromkeys(("table_ptr", "sums_ptr"), "*fp64"),
    **dict.fromkeys(("keys_ptr", "tokens_ptr"), "*i64"),
    **dict.fromkeys(("row_stride", "vocab_size", "num_in_order", "num_chunks"), "i32"),
}


def draw_case(kernel: Any, *, has_wide_loads: bool = True) -> Case:
    """Return the case of one step of a random draw."""
    constants = {"chunk": 2048, "chunk_block": 128, "width": 1024, "block": 1024}
    return Case(
        f"random tokens, {kernel.__name__}",
        kernel,
        {name: kind for name, kind in DRAWS.items() if name in kernel.arg_names},
        {name: value for name, value in constants.items() if name in kernel.arg_names},
        aligned=tuple(name for name in DRAWS if name in kernel.arg_names and name[:3] != "num"),
        options={"num_warps": 4},
        has_wide_loads=has_wide_loads,
    )


CASES = [
    draw_case(draws.chunk_maxima_kernel),
    draw_case(draws.chunk_sums_kernel),
    draw_case(draws.draw_in_order_kernel),
    draw_case(draws.draw_in_ranks_kernel),
    Case(
        "greedy",
        greedy_kernel,
        {"logits_ptr": "*fp32", "row_stride": "i32", "vocab_size": "i32", "tokens_ptr": "*i64"},
        {"block": 16384},
        aligned=("logits_ptr", "tokens_ptr", *SIZES),
        options={"num_warps": 16},
    ),
    Case(
        "copy of logits under a mask",
        copy_allowed_kernel,
        {
            **dict.fromkeys(("logits_ptr", "out_ptr"), "*fp32"),
            **dict.fromkeys(("rows_ptr", "mask_of_ptr"), "*i32"),
            "masks_ptr": "*u8",
            **dict.fromkeys(("row_stride", "mask_bytes", "vocab_size"), "i32"),
        },
        {"block": 4096},
        aligned=("logits_ptr", "out_ptr", "rows_ptr", "mask_of_ptr", "masks_ptr", *SIZES),
        options={"num_warps": 4},
    ),
    Case(
        "changes of single tokens",
        edit_tokens_kernel,
        {
            "places_ptr": "*i32",
            "amounts_ptr": "*fp32",
            "num_places": "i32",
            "vocab_size": "i32",
            "out_ptr": "*fp32",
        },
        {"block": 256},
        aligned=("places_ptr", "amounts_ptr", "out_ptr", "vocab_size"),
        options={"num_warps": 2, "enable_fp_fusion": False},
        has_wide_loads=False,  # a thread has few tokens, which lie anywhere
    ),
]
