"""The format of each matrix of a model in a mix: columns limit the choice, the mix decides where bits go."""

import dataclasses

import pytest

from moeflow.core.attention_config import RopeConfig
from moeflow.core.errors import ConfigError
from moeflow.core.model_config import EncoderConfig, ModelConfig
from moeflow.kernels.weight_format import BITS_PER_VALUE, LayerFormats
from moeflow.planner.choices.mixes import mixed_formats

WIDE = ModelConfig.from_fields(
    model_type="qwen3_moe",
    vocab_size=1000,
    hidden_size=512,
    num_layers=16,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=256,
    max_position=128,
    eps=1e-5,
    rope=RopeConfig(),
    num_experts=4,
    top_k=2,
)
NARROW = WIDE.with_fields(hidden_size=576, num_heads=9, num_kv_heads=3, intermediate_size=1536)
ENCODER = dataclasses.replace(WIDE, encoder=EncoderConfig(num_layers=2, decoder_start_token_id=0))


def test_columns_in_whole_blocks_have_two_levels_everywhere():
    found = mixed_formats("q4_k", WIDE)
    two = "q4_k"
    layer = LayerFormats(q_proj=two, k_proj=two, v_proj="q6_k", o_proj=two, up=two, down=two)
    assert (found.matrices, found.embeddings, found.layers) == (two, "q6_k", (layer,) * 16)


@pytest.mark.parametrize(("mix", "small"), [("q4_k", "iq4_nl"), ("q4_k_m", "q5_0")])
def test_other_columns_have_blocks_of_32(mix, small):
    found = mixed_formats(mix, NARROW)
    layer = LayerFormats(q_proj=small, k_proj=small, v_proj="int8", o_proj=small, up=small, down="q4_k")
    assert found.layers[2] == layer
    assert (found.matrices, found.embeddings) == (small, "int8")


def test_dense_layers_have_the_format_of_their_own_width():
    shape = WIDE.with_fields(dense_layers=(0,), dense_intermediate_size=1000)
    assert [layer.down for layer in mixed_formats("q4_k", shape).layers[:2]] == ["int4", "q4_k"]
    shape = shape.with_fields(dense_intermediate_size=992)
    assert [layer.down for layer in mixed_formats("q4_k", shape).layers[:2]] == ["iq4_nl", "q4_k"]


@pytest.mark.parametrize("shape", [WIDE, NARROW])
def test_a_medium_mix_never_has_fewer_bits_than_the_small_one(shape):
    small, medium = (mixed_formats(mix, shape) for mix in ("q4_k", "q4_k_m"))
    for less, more in zip(small.layers, medium.layers, strict=True):
        for part in PARTS:
            assert BITS_PER_VALUE[less.of(part)] <= BITS_PER_VALUE[more.of(part)]
    assert all(BITS_PER_VALUE[layer.v_proj] > 6 for layer in medium.layers)


PARTS = [field.name for field in dataclasses.fields(LayerFormats)]


def test_a_medium_mix_gives_more_to_downs_of_the_first_layers_the_last_and_some_between():
    more = [number for number, layer in enumerate(mixed_formats("q4_k_m", WIDE).layers) if layer.down == "q6_k"]
    assert more == [0, 1, 4, 7, 10, 13, 14, 15]


@pytest.mark.parametrize(("shape", "can_differ"), [(WIDE, False), (ENCODER, True)])
def test_one_format_where_matrices_cannot_differ(shape, can_differ):
    assert mixed_formats("q4_k", shape, can_differ=can_differ).layers == ()
    with pytest.raises(ConfigError, match="use --quantize q4_k"):
        mixed_formats("q4_k_m", shape, can_differ=can_differ)


def test_the_one_format_is_one_that_holds_all_columns():
    assert mixed_formats("q4_k", NARROW, can_differ=False).matrices == "iq4_nl"
    assert mixed_formats("q4_k", WIDE, can_differ=False).matrices == "q4_k"
