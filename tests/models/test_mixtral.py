import pytest
from transformers import MixtralConfig

from tests.models.parity import SHAPE, Parity, make_pair

CONFIGS = {
    "two of four": MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2),
    "three of seven, tied": MixtralConfig(
        **SHAPE, num_local_experts=7, num_experts_per_tok=3, tie_word_embeddings=True
    ),
    "only one expert": MixtralConfig(**SHAPE, num_local_experts=1, num_experts_per_tok=1),
    "sliding window": MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2, sliding_window=6),
}


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request, tmp_path_factory):
    return make_pair(CONFIGS[request.param], tmp_path_factory.mktemp("mixtral"))


class TestMixtral(Parity):
    pass
