import pytest
from transformers import DeepseekV2Config

from tests.models.parity import SHAPE, Parity, make_pair

LATENT = SHAPE | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": None,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
V2 = LATENT
CONFIGS = {
    "dense": DeepseekV2Config(**V2, first_k_dense_replace=3),
    "dense, q_lora": DeepseekV2Config(**V2 | {"q_lora_rank": 18}, first_k_dense_replace=3),
}


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request, tmp_path_factory):
    return make_pair(CONFIGS[request.param], tmp_path_factory.mktemp("deepseek"))


class TestDeepseek(Parity):
    pass
