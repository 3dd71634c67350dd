import pytest
from transformers import Qwen2Config

from tests.models.parity import SHAPE, Parity, make_pair

CONFIGS = {
    "as published": Qwen2Config(**SHAPE),
    "tied, windows of some layers": Qwen2Config(
        **SHAPE, tie_word_embeddings=True, use_sliding_window=True, sliding_window=9, max_window_layers=1
    ),
}


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request, tmp_path_factory):
    return make_pair(CONFIGS[request.param], tmp_path_factory.mktemp("qwen2"))


class TestQwen2(Parity):
    pass
