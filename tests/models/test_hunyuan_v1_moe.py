import pytest
from transformers import HunYuanMoEV1Config

from tests.models.parity import SHAPE, Parity, make_pair

MOE = SHAPE | {"num_experts": 6, "moe_topk": 3, "head_dim": 8}
CONFIGS = {
    "plain positions": HunYuanMoEV1Config(**MOE, tie_word_embeddings=True),
    "as published, biased": HunYuanMoEV1Config(
        **MOE,
        attention_bias=True,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0},
    ),
}


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request, tmp_path_factory):
    return make_pair(CONFIGS[request.param], tmp_path_factory.mktemp("hunyuan_v1_moe"))


class TestHunyuanMoe(Parity):
    pass
