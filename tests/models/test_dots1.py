import pytest
from transformers import Dots1Config

from tests.models.parity import SHAPE, Parity, make_pair

MOE = SHAPE | {
    "moe_intermediate_size": 24,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
}
CONFIGS = {
    "as published": Dots1Config(**MOE, norm_topk_prob=True, routed_scaling_factor=2.5, sliding_window=None),
    "biased, windows of some layers": Dots1Config(**MOE, attention_bias=True, sliding_window=9, max_window_layers=1),
}


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request, tmp_path_factory):
    return make_pair(CONFIGS[request.param], tmp_path_factory.mktemp("dots1"))


class TestDots1(Parity):
    pass
