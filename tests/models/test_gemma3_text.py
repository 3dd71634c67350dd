import pytest
from transformers import Gemma3TextConfig

from moeflow.core.attention_config import RopeConfig
from moeflow.core.errors import CheckpointError
from tests.models.fake_checkpoint import shape_of
from tests.models.parity import SHAPE, Parity, make_pair

GEMMA = SHAPE | {"head_dim": 12, "sliding_window": 9, "query_pre_attn_scalar": 20}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e4}
CONFIGS = {
    "each third layer is global": Gemma3TextConfig(
        **GEMMA, layer_types=["sliding_attention", "sliding_attention", "full_attention"]
    ),
    "stretched positions, capped logits, biased, untied": Gemma3TextConfig(
        **GEMMA,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        rope_parameters={"full_attention": LINEAR, "sliding_attention": {"rope_type": "default", "rope_theta": 300.0}},
        final_logit_softcapping=2.0,
        attention_bias=True,
        tie_word_embeddings=False,
    ),
}


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request, tmp_path_factory):
    return make_pair(CONFIGS[request.param], tmp_path_factory.mktemp("gemma3_text"))


class TestGemma3Text(Parity):
    pass


def raw(**changes):
    config = Gemma3TextConfig(**GEMMA).to_dict() | {"architectures": ["Gemma3ForCausalLM"]} | changes
    return {key: value for key, value in config.items() if value is not ...}


def test_configs_from_before_transformers_5():
    old = {"rope_theta": 2e6, "rope_local_base_freq": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    shape = shape_of(raw(rope_parameters=..., layer_types=..., num_hidden_layers=4, sliding_window_pattern=2, **old))
    everything, local = RopeConfig(2e6, "linear", 8.0), RopeConfig(500.0)
    assert [(kind.rope, kind.sliding_window) for kind in shape.attention.layer_kinds] == [
        (local, 9),
        (everything, None),
    ] * 2
    bare = shape_of(raw(rope_parameters=..., layer_types=..., num_hidden_layers=6))
    assert [kind.sliding_window for kind in bare.attention.layer_kinds] == [9] * 5 + [None]
    assert [rope.theta for rope in bare.attention.ropes] == [1e4, 1e6]


def test_what_google_leaves_out_is_as_transformers_has_it():
    """The text part of a model that sees images says little."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}
    shape, want = shape_of(config), Gemma3TextConfig(**text)
    assert (shape.attention.num_heads, shape.attention.num_kv_heads, shape.attention.head_dim) == (
        want.num_attention_heads,
        want.num_key_value_heads,
        want.head_dim,
    )
    assert (shape.vocab_size, shape.norms.eps) == (want.vocab_size, want.rms_norm_eps)
    assert shape.embeddings.tie_word_embeddings is want.tie_word_embeddings is True
    assert shape.attention.score_scale == want.query_pre_attn_scalar**-0.5
    assert [kind.sliding_window is None for kind in shape.attention.layer_kinds] == [
        kind == "full_attention" for kind in want.layer_types
    ]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"hidden_activation": "relu"}, "'hidden_activation' is 'relu'"),
        ({"attn_logit_softcapping": 50.0}, "'attn_logit_softcapping' is 50.0"),
        ({"use_bidirectional_attention": True}, "'use_bidirectional_attention' is True"),
        ({"query_pre_attn_scalar": 0}, "'query_pre_attn_scalar' is 0"),
        ({"final_logit_softcapping": -3.0}, "'final_logit_softcapping' is -3"),
    ],
)
def test_what_cannot_be_computed_is_refused(changes, complaint):
    with pytest.raises(CheckpointError, match=complaint):
        shape_of(raw(**changes))
