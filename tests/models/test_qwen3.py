import pytest
from transformers import Qwen3Config

from tests.models.parity import SHAPE, Parity, make_pair

CONFIGS = {
    "as published": Qwen3Config(**SHAPE | {"head_dim": 16}, tie_word_embeddings=True),
    "biased, windows of all layers": Qwen3Config(
        **SHAPE | {"head_dim": 12}, attention_bias=True, use_sliding_window=True, sliding_window=9, max_window_layers=0
    ),
}


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request, tmp_path_factory):
    return make_pair(CONFIGS[request.param], tmp_path_factory.mktemp("qwen3"))


class TestQwen3(Parity):
    pass
