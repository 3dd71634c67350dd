import pytest
from transformers import Qwen2MoeConfig

from tests.models.parity import SHAPE, Parity, make_pair

MOE = SHAPE | {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
CONFIGS = {
    "as published": Qwen2MoeConfig(**MOE),
    "renormalised, dense layers, windows of some layers": Qwen2MoeConfig(
        **MOE,
        norm_topk_prob=True,
        mlp_only_layers=[0],
        qkv_bias=False,
        use_sliding_window=True,
        sliding_window=9,
        max_window_layers=2,
    ),
}


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request, tmp_path_factory):
    return make_pair(CONFIGS[request.param], tmp_path_factory.mktemp("qwen2_moe"))


class TestQwen2Moe(Parity):
    pass
