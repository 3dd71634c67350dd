"""The routing kernel, as it is compiled: Qwen3, gpt-oss, DeepSeek-V3, Phi-3.5-MoE and 512 experts (Qwen3-Next)."""

from typing import Any

import triton

from moeflow.kernels.triton.routing import routing_kernel
from tests.kernels.triton.ahead_of_time import Case

SIGNATURE = {
    "logits_ptr": "*fp32",
    "bias_ptr": "*fp32",
    "scales_ptr": "*fp32",
    "ids_ptr": "*i64",
    "weights_ptr": "*fp32",
    "stride": "i32",
    "epsilon": "fp32",
    "min_total": "fp32",
    "scale": "fp32",
    "jitter": "fp32",
    "group_size": "i32",
    "num_groups": "i32",
}
ALIGNED = ("logits_ptr", "bias_ptr", "scales_ptr", "ids_ptr", "weights_ptr", "stride", "group_size")


def case(name: str, num_experts: int, top_k: int, num_groups: int = 1, num_chosen: int = 1, **ways: Any) -> Case:
    """Return the case of a model."""
    constants = {
        "num_chosen_groups": num_chosen,
        "top_k": top_k,
        "score": "softmax",
        "sums_two": False,
        "renormalizes": True,
        "has_bias": False,
        "has_scales": False,
        "num_shared": 0,
        "has_shared_gate": False,
        "block_groups": num_groups,
        "block_size": triton.next_power_of_2(num_experts // num_groups),
        "block_k": triton.next_power_of_2(top_k + ways.get("num_shared", 0)),
    } | ways
    # A warp of a row: a lane has no four neighbours of few experts, and a row is read once.
    return Case(name, routing_kernel, SIGNATURE, constants, ALIGNED, {"num_warps": 1}, has_wide_loads=False)


CASES = [
    case("qwen3, routing", 128, 8),
    case("gpt-oss, routing", 32, 4),
    case("deepseek-v3, routing", 256, 8, 8, 4, score="sigmoid", sums_two=True, has_bias=True, num_shared=1),
    case("phi-3.5-moe, routing", 16, 2, score="sparsemixer", renormalizes=False),
    case("one gate, routing", 1, 1, score="sigmoid", renormalizes=False),
    case("qwen3-next, routing", 512, 10, has_scales=True, num_shared=1, has_shared_gate=True),
]
