import pytest
from transformers import OlmoeConfig

from tests.models.parity import SHAPE, Parity, make_pair

MOE = SHAPE | {"num_experts": 8, "num_experts_per_tok": 4}
CONFIGS = {
    "as published": OlmoeConfig(**MOE),
    "clipped, weights sum to one": OlmoeConfig(**MOE, clip_qkv=0.5, norm_topk_prob=True),
    "biased": OlmoeConfig(**MOE, attention_bias=True),
}


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request, tmp_path_factory):
    return make_pair(CONFIGS[request.param], tmp_path_factory.mktemp("olmoe"))


class TestOlmoe(Parity):
    pass
