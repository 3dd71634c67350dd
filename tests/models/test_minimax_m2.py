import pytest
from transformers import MiniMaxM2Config

from tests.models.parity import SHAPE, Parity, make_pair

MOE = SHAPE | {"head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 3}
CONFIGS = {
    "half of each head rotated": MiniMaxM2Config(**MOE, rotary_dim=8),
    "all of it": MiniMaxM2Config(**MOE, tie_word_embeddings=True),
}


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request, tmp_path_factory):
    return make_pair(CONFIGS[request.param], tmp_path_factory.mktemp("minimax_m2"))


class TestMiniMaxM2(Parity):
    pass
