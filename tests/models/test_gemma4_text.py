import pytest
import torch
from transformers import Gemma4TextConfig

from moeflow.core.attention_config import HeadSizes
from moeflow.core.errors import CheckpointError
from moeflow.models.layers.allocation.weight_formats import WeightFormats
from tests.models.fake_checkpoint import shape_of
from tests.models.parity import SHAPE, Cache, Parity, close, load, make_pair, tokens

DENSE = SHAPE | {
    "head_dim": 12,
    "global_head_dim": 24,
    "sliding_window": 9,
    "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}
MOE = DENSE | {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 24}
TABLE = {"hidden_size_per_layer_input": 20, "vocab_size_per_layer_input": 101}
PHONE = (
    DENSE
    | TABLE
    | {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
    }
)
YARN = {"rope_type": "yarn", "factor": 2.0}
CONFIGS = {
    "as published": Gemma4TextConfig(**MOE, attention_k_eq_v=True, num_global_key_value_heads=1),
    "values of their own, biased, capped logits, untied": Gemma4TextConfig(
        **MOE,
        attention_bias=True,
        final_logit_softcapping=2.0,
        tie_word_embeddings=False,
        rope_parameters={
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.5,
                "rope_theta": 3e4,
                "factor": 2.0,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
    ),
    "dense": Gemma4TextConfig(**DENSE, attention_k_eq_v=True, num_global_key_value_heads=1),
    "for phones": Gemma4TextConfig(**PHONE, use_double_wide_mlp=True),
    "layers share keys that are values": Gemma4TextConfig(
        **PHONE | {"num_kv_shared_layers": 3},
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        attention_bias=True,
    ),
    "tokens are embedded for each layer": Gemma4TextConfig(**DENSE | TABLE, final_logit_softcapping=3.0),
}


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request, tmp_path_factory):
    return make_pair(CONFIGS[request.param], tmp_path_factory.mktemp("gemma4_text"))


class TestGemma4Text(Parity):
    pass


def raw(**changes):
    config = CONFIGS["as published"].to_dict() | {"architectures": ["Gemma4ForCausalLM"]} | changes
    return {key: value for key, value in config.items() if value is not ...}


def test_heads_of_configs_that_speak_of_kinds_of_layers():
    """Configs as Google publishes them; transformers writes the values derived for each layer."""
    kinds = {"per_layer_config": ..., "global_head_dim": 24, "num_global_key_value_heads": 1}
    assert shape_of(raw(**kinds)) == shape_of(raw())
    assert shape_of(raw(**kinds | {"attention_k_eq_v": False})).attention.heads_of(2) == HeadSizes(2, 24)
    bare = shape_of(raw(per_layer_config=..., num_global_key_value_heads=...))
    assert bare.attention.heads_of(2) == HeadSizes(2, 512, values_are_keys=True)


def test_what_google_leaves_out_is_as_transformers_has_it():
    said = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 7, "hidden_size_per_layer_input": 0}
    want = Gemma4TextConfig(**said)
    shape = shape_of({"architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text"} | said)
    assert [kind.sliding_window is None for kind in shape.attention.layer_kinds] == [
        kind == "full_attention" for kind in want.layer_types
    ]
    assert (shape.attention.num_heads, shape.vocab_size, shape.norms.eps) == (
        want.num_attention_heads,
        want.vocab_size,
        want.rms_norm_eps,
    )
    for layer_idx in range(7):
        theirs = want.per_layer_config[layer_idx]
        assert shape.attention.heads_of(layer_idx) == HeadSizes(theirs.num_key_value_heads, theirs.head_dim)
    assert {rope.theta for rope in shape.attention.ropes} == {1e4, 1e6}
    assert shape.embeddings.tie_word_embeddings is want.tie_word_embeddings is True


def test_experts_beside_shared_keys(tmp_path):
    """transformers cannot run this config unless it describes each layer."""
    config = MOE | {"num_hidden_layers": 6, "layer_types": PHONE["layer_types"], "num_kv_shared_layers": 2}
    pair = make_pair(Gemma4TextConfig(**config), tmp_path)
    ids = tokens(40)
    with torch.inference_mode():
        want = pair.theirs(torch.tensor([ids]), output_hidden_states=True).logits[0]
    for ours in (pair.ours, load(tmp_path, packed=WeightFormats("float32", "float32"))):
        close(Cache(ours).run({"a": ids})["a"], want)


def test_shared_keys_and_values_are_kept_once():
    shape = shape_of(CONFIGS["for phones"].to_dict() | {"architectures": ["Gemma4ForCausalLM"]})
    assert shape.kv_layers == (0, 1, 2, 3)
    assert [shape.attention.heads_of(layer).kv_layer for layer in range(6)] == [None] * 4 + [3, 2]
    assert shape.kv_bytes_per_token("float32") == 4 * 2 * 2 * (12 + 12 + 24 + 12)
    assert shape.attended_bytes_per_token("float32") == 4 * 2 * 2 * (4 * 12 + 2 * 24)
    assert shape.feed_forward.wide_layers == (4, 5)


def test_keys_and_values_of_each_layer_are_counted():
    shape = shape_of(raw())
    assert shape.kv_bytes_per_token("float32") == 4 * 2 * (2 * 12 + 2 * 12 + 24)
    assert shape.kv_bytes_per_token("int8") == 2 * (2 * 12 + 2 * 12 + 24) + 2 * 4 * (2 + 2 + 1)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"hidden_size_per_layer_input": 8}, "'hidden_size_per_layer_input' is 8: not supported beside experts"),
        ({"hidden_size_per_layer_input": ...}, "'hidden_size_per_layer_input' is 256"),
        ({"hidden_size_per_layer_input": -1}, "'hidden_size_per_layer_input' is -1, where at least 1"),
        ({"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96}, "for each layer, but only 96"),
        ({"use_double_wide_mlp": True}, "'use_double_wide_mlp' is True: not supported beside experts"),
        ({"num_kv_shared_layers": 1}, "'num_kv_shared_layers' is 1, of 3 layers: .* none of each kind"),
        ({"num_kv_shared_layers": 4}, "'num_kv_shared_layers' is 4, of 3 layers"),
        ({"num_kv_shared_layers": -1}, "'num_kv_shared_layers' is -1"),
        (
            {"num_kv_shared_layers": 1, "layer_types": [*["sliding_attention", "full_attention"], "full_attention"]},
            "layer 2 attends to keys of layer 1, whose heads are others",
        ),
        ({"use_bidirectional_attention": "all"}, "'use_bidirectional_attention' is not null or 'vision'"),
        ({"hidden_activation": "relu"}, "'hidden_activation' is 'relu'"),
        ({"per_layer_config": {"0": {"hidden_size": 8}}}, "what it says of layer 0 is .*heads alone may differ"),
        ({"per_layer_config": {"2": {"num_key_value_heads": 3}}}, "layer 2 has 4 heads of queries, 3 of keys"),
        ({"rope_parameters": {"full_attention": {}}}, "the rotary settings of sliding_attention are None"),
        (
            {"rope_parameters": dict.fromkeys(["sliding_attention", "full_attention"], {"rope_theta": 9.0} | YARN)},
            "rotary positions are of the kind 'yarn'",
        ),
        ({"top_k_experts": 9}, "'num_experts_per_tok' is 9, of 8 experts"),
    ],
)
def test_what_cannot_be_computed_is_refused(changes, complaint):
    with pytest.raises(CheckpointError, match=complaint):
        shape_of(raw(**changes))
