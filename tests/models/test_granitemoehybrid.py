import math

import pytest
from transformers import GraniteMoeHybridConfig

from moeflow.core.errors import CheckpointError
from tests.models.fake_checkpoint import shape_of
from tests.models.parity import SHAPE, Cache, Parity, close, make_pair, their_logits, tokens

MAMBA = SHAPE | {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 12,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "shared_intermediate_size": 40,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.4,
    "logits_scaling": 0.6,
}
DENSE = MAMBA | {"num_local_experts": 0, "num_experts_per_tok": 0}
CONFIGS = {
    "as published": GraniteMoeHybridConfig(**MAMBA, rms_norm_eps=1e-5),
    "positions, biased, tied, one group": GraniteMoeHybridConfig(
        **MAMBA | {"mamba_n_groups": 1},
        position_embedding_type="rope",
        attention_bias=True,
        mamba_conv_bias=False,
        mamba_proj_bias=True,
        mamba_d_conv=3,
        tie_word_embeddings=True,
    ),
    "dense": GraniteMoeHybridConfig(**DENSE),
    "dense, all attend": GraniteMoeHybridConfig(
        **DENSE | {"layer_types": ["full_attention"] * 3}, position_embedding_type="rope"
    ),
}


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request, tmp_path_factory):
    return make_pair(CONFIGS[request.param], tmp_path_factory.mktemp("granitemoehybrid"))


class TestGraniteMoeHybrid(Parity):
    pass


def test_steps_have_limits(tmp_path):
    """Transformers has them in whole prompts alone, so that is what this compares."""
    pair = make_pair(GraniteMoeHybridConfig(**MAMBA, time_step_limit=[0.4, 0.6]), tmp_path)
    ids = tokens(37)
    close(Cache(pair.ours).run({"a": ids})["a"], their_logits(pair.theirs, ids))


def raw_of(**changes):
    return GraniteMoeHybridConfig(**MAMBA).to_dict() | {"architectures": ["GraniteMoeHybridForCausalLM"]} | changes


def test_keys_as_older_versions_wrote_them():
    older = raw_of(mamba_d_head="auto", position_embedding_type="nope", layer_types=None, time_step_limit=None)
    older["layers_block_type"] = ["mamba", "attention", "mamba"]
    assert shape_of(older) == shape_of(raw_of())


@pytest.mark.parametrize(
    "key",
    [
        "shared_intermediate_size",
        "num_local_experts",
        "mamba_n_heads",
        "mamba_n_groups",
        "mamba_d_state",
        "mamba_d_head",
        "mamba_d_conv",
        "mamba_expand",
        "mamba_conv_bias",
        "mamba_proj_bias",
        "residual_multiplier",
        "tie_word_embeddings",
    ],
)
def test_a_key_that_is_missing_has_transformers_default(key):
    small = {"num_local_experts": 8, "hidden_size": 128, "mamba_n_heads": 128, "mamba_d_head": "auto"}
    stated = GraniteMoeHybridConfig(**small, layer_types=["linear_attention"] * 2, num_hidden_layers=2).to_dict()
    stated["architectures"] = ["GraniteMoeHybridForCausalLM"]
    missing = {name: value for name, value in stated.items() if name != key}
    assert shape_of(missing) == shape_of(stated)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"mamba_d_head": 9}, "'mamba_n_heads' are 8, of 9 dimensions each"),
        ({"mamba_n_groups": 3}, "no multiple of 'mamba_n_groups', 3"),
        ({"mamba_d_state": 512}, "'mamba_d_state' is 512"),
        ({"mamba_d_conv": 17}, "'mamba_d_conv' is 17"),
        ({"position_embedding_type": "alibi"}, "'position_embedding_type' is 'alibi'"),
        ({"time_step_limit": [0.5, 0.1]}, "'time_step_limit' is"),
        ({"time_step_limit": [0.5, "much"]}, "'time_step_limit' is"),
        *(
            ({"time_step_limit": limits}, "'time_step_limit' is")
            for limits in (1, 0.5, True, 0, False, "", [], {}, [0.5], [False, True], [[0], [1]], [None, 1])
        ),
        ({"time_step_limit": [0, 10**400]}, "'time_step_limit' is"),
        ({"time_step_limit": [math.inf, math.inf]}, "'time_step_limit' is"),
        ({"time_step_limit": [0.0, math.nan]}, "'time_step_limit' is"),
        ({"layer_types": ["mamba", "conv", "mamba"]}, "a layer is 'conv'"),
        ({"num_local_experts": 2}, "'num_experts_per_tok' is 3, of 2 experts"),
    ],
)
def test_configs_that_are_refused(changes, problem):
    with pytest.raises(CheckpointError, match=problem.replace("[", r"\[")):
        shape_of(raw_of(**changes))
