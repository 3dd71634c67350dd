import pytest
from transformers import Lfm2MoeConfig

from tests.models.parity import SHAPE, Parity, make_pair

MOE = SHAPE | {
    "layer_types": ["conv", "full_attention", "conv"],
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "num_dense_layers": 1,
}
CONFIGS = {
    "as published": Lfm2MoeConfig(**MOE),
    "scaled, weights do not sum to one": Lfm2MoeConfig(
        **MOE | {"num_dense_layers": 0}, norm_topk_prob=False, routed_scaling_factor=1.5, conv_bias=True
    ),
}


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request, tmp_path_factory):
    return make_pair(CONFIGS[request.param], tmp_path_factory.mktemp("lfm2_moe"))


class TestLfm2Moe(Parity):
    pass
