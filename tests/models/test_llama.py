import pytest
from transformers import LlamaConfig

from tests.models.parity import SHAPE, Parity, make_pair

CONFIGS = {
    "grouped": LlamaConfig(**SHAPE),
    "all heads, own width": LlamaConfig(**SHAPE | {"num_key_value_heads": 4, "head_dim": 12}),
    "one kv head": LlamaConfig(**SHAPE | {"num_key_value_heads": 1}),
    "tied": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "biased": LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
    "linear": LlamaConfig(**SHAPE, rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}),
    "llama3": LlamaConfig(
        **SHAPE,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "yarn": LlamaConfig(
        **SHAPE,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 500.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 4.0,
        },
    ),
    "yarn, between dimensions": LlamaConfig(
        **SHAPE,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 500.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 4.0,
            "truncate": False,
        },
    ),
    "yarn, as DeepSeek writes it": LlamaConfig(
        **SHAPE,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 500.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "mscale": 1.0,
            "mscale_all_dim": 0.6,
        },
    ),
}


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request, tmp_path_factory):
    return make_pair(CONFIGS[request.param], tmp_path_factory.mktemp("llama"))


class TestLlama(Parity):
    pass
