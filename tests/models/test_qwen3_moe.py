import pytest
from transformers import Qwen3MoeConfig

from tests.models.parity import SHAPE, Parity, make_pair

MOE = SHAPE | {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 16}
CONFIGS = {
    "as published": Qwen3MoeConfig(**MOE, norm_topk_prob=True),
    "weights as they are": Qwen3MoeConfig(**MOE, norm_topk_prob=False),
    "dense layers, by list": Qwen3MoeConfig(**MOE, norm_topk_prob=True, mlp_only_layers=[1]),
    "dense layers, by step": Qwen3MoeConfig(**MOE, norm_topk_prob=True, decoder_sparse_step=2),
    "biased, tied, window": Qwen3MoeConfig(
        **MOE, attention_bias=True, tie_word_embeddings=True, use_sliding_window=True, sliding_window=9
    ),
}


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request, tmp_path_factory):
    return make_pair(CONFIGS[request.param], tmp_path_factory.mktemp("qwen3_moe"))


class TestQwen3Moe(Parity):
    pass
