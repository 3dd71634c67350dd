import pytest
from transformers import GraniteMoeConfig, GraniteMoeSharedConfig

from moeflow.core.errors import CheckpointError
from tests.models.fake_checkpoint import shape_of
from tests.models.parity import SHAPE, Parity, make_pair

MOE = SHAPE | {"num_local_experts": 8, "num_experts_per_tok": 3}
SCALED = MOE | {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.4,
    "logits_scaling": 0.6,
}
CONFIGS = {
    "multipliers": GraniteMoeConfig(**SCALED),
    "biased, tied": GraniteMoeConfig(**MOE, attention_bias=True, tie_word_embeddings=True),
    "a shared expert": GraniteMoeSharedConfig(**SCALED, shared_intermediate_size=40),
    "no shared expert": GraniteMoeSharedConfig(**SCALED, shared_intermediate_size=0),
}


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request, tmp_path_factory):
    return make_pair(CONFIGS[request.param], tmp_path_factory.mktemp("granitemoe"))


class TestGraniteMoe(Parity):
    pass


@pytest.mark.parametrize("key", ["embedding_multiplier", "residual_multiplier", "logits_scaling"])
def test_multipliers_of_zero_are_refused(key):
    raw = GraniteMoeConfig(**SCALED).to_dict() | {"architectures": ["GraniteMoeForCausalLM"], key: 0.0}
    with pytest.raises(CheckpointError, match=f"'{key}' is 0"):
        shape_of(raw)
