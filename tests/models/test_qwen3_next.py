import pytest
from transformers import Qwen3_5MoeTextConfig, Qwen3NextConfig

from tests.models.parity import SHAPE, Parity, make_pair

MOE = SHAPE | {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_conv_kernel_dim": 4,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "num_experts": 8,
    "num_experts_per_tok": 3,
}
CONFIGS = {
    "as published": Qwen3NextConfig(**MOE),
    "a dense layer, weights do not sum to one, biased": Qwen3NextConfig(
        **MOE, mlp_only_layers=[1], norm_topk_prob=False, attention_bias=True, partial_rotary_factor=0.5
    ),
    "Qwen3.5": Qwen3_5MoeTextConfig(**MOE),
}


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request, tmp_path_factory):
    return make_pair(CONFIGS[request.param], tmp_path_factory.mktemp("qwen3_next"))


class TestQwen3Next(Parity):
    pass
