import pytest
from transformers import Lfm2Config

from tests.models.parity import SHAPE, Parity, make_pair

LAYERS = ["conv", "full_attention", "conv"]
CONFIGS = {
    "as published": Lfm2Config(**SHAPE, layer_types=LAYERS, block_auto_adjust_ff_dim=False),
    "adjusted width, biased": Lfm2Config(
        **SHAPE, layer_types=LAYERS, conv_bias=True, block_multiple_of=16, block_ffn_dim_multiplier=1.1
    ),
    "four taps, layers by number": Lfm2Config(**SHAPE, full_attn_idxs=[2], conv_L_cache=4, tie_word_embeddings=False),
    "attention alone": Lfm2Config(**SHAPE, full_attn_idxs=[0, 1, 2]),
}


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request, tmp_path_factory):
    return make_pair(CONFIGS[request.param], tmp_path_factory.mktemp("lfm2"))


class TestLfm2(Parity):
    pass
