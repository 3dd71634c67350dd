import pytest
from transformers import Ernie4_5_MoeConfig

from tests.models.parity import SHAPE, Parity, make_pair

MOE = SHAPE | {"moe_intermediate_size": 24, "moe_num_experts": 6, "moe_k": 3}
CONFIGS = {
    "as published": Ernie4_5_MoeConfig(**MOE),
    "no shared expert, every other layer dense": Ernie4_5_MoeConfig(
        **MOE, moe_num_shared_experts=0, moe_layer_start_index=0, moe_layer_interval=2, tie_word_embeddings=False
    ),
}


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request, tmp_path_factory):
    return make_pair(CONFIGS[request.param], tmp_path_factory.mktemp("ernie4_5_moe"))


class TestErnie45Moe(Parity):
    pass
