import pytest
from transformers import Glm4MoeConfig

from tests.models.parity import SHAPE, Parity, make_pair

MOE = SHAPE | {
    "head_dim": 16,
    "moe_intermediate_size": 24,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
}
CONFIGS = {
    "as published": Glm4MoeConfig(**MOE, attention_bias=True, use_qk_norm=True, routed_scaling_factor=2.5),
    "groups, two shared": Glm4MoeConfig(
        **MOE | {"n_routed_experts": 8}, n_group=4, topk_group=2, n_shared_experts=2, norm_topk_prob=False
    ),
}


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request, tmp_path_factory):
    return make_pair(CONFIGS[request.param], tmp_path_factory.mktemp("glm4_moe"))


class TestGlm4Moe(Parity):
    pass
