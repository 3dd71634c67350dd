"""The kernels of experts with norms of their own, for Gemma 4 26B-A4B: the network that all go to is three experts."""

from __future__ import annotations

import torch

from moeflow.kernels.norm import ExpertNorms, NormWeights, PostNorms
from moeflow.kernels.triton.normed_experts import expert_inputs, normed_experts
from tests.kernels.triton.expert_shapes import empty
from tests.kernels.triton.recorded_cases import recorded

HIDDEN, WIDTH, NUM_EXPERTS, NUM_SHARED, TOP_K = 2816, 704, 128, 3, 8


def layer(num_tokens: int, capability: int) -> list:
    dtype = torch.bfloat16 if capability >= 80 else torch.float16
    weight, hidden = empty(HIDDEN, dtype=dtype), empty(num_tokens, HIDDEN, dtype=dtype)
    norm = NormWeights(weight, 1e-6)
    norms = PostNorms(norm, norm, ExpertNorms(weight, 0.02, weight, weight, norm, norm), empty(1, dtype=dtype))
    all_experts, shape = NUM_EXPERTS + NUM_SHARED, (num_tokens, TOP_K + NUM_SHARED)
    matrices = (
        empty(all_experts, 2 * WIDTH, HIDDEN, dtype=dtype),
        empty(all_experts, HIDDEN, WIDTH, dtype=dtype),
    )
    chosen = (empty(*shape, dtype=torch.int64), empty(*shape, dtype=torch.float32))

    def call() -> None:
        _, inputs = expert_inputs(hidden, hidden, 1e-6, norm, norms.experts)
        normed_experts(inputs[:2], matrices, chosen, NUM_SHARED, hidden, norms, function="gelu_tanh", next_norm=norm)

    return recorded(f"gemma-4, {num_tokens} tokens", call, capability)


CASES = [
    *layer(1, 75),
    *(case for capability in (80, 89, 90) for num_tokens in (1, 16) for case in layer(num_tokens, capability)),
]
