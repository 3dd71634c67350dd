from __future__ import annotations

import pytest

from moeflow.core.errors import CheckpointError
from moeflow.core.model_config import ConfigReader, ModelConfig
from tests.shapes import MIXTRAL


def test_parameters_of_mixtral_8x7b_are_the_published_ones():
    config = MIXTRAL
    assert config.num_parameters == pytest.approx(46.7e9, rel=1e-3)
    assert config.num_active_parameters == pytest.approx(12.9e9, rel=0.02)
    assert config.kv_bytes_per_token("bfloat16") == 131072
    assert config.kv_bytes_per_token("int8") == 131072 // 2 + 131072 // 2 // config.attention.head_dim * 4


def test_wrong_keys_name_file_key_and_remedy():
    reader = ConfigReader({"a": "x", "b": None, "c": True, "d": float("inf"), "e": 3, "f": 0}, "some/config.json")
    for kind, key in ((int, "a"), (int, "b"), (int, "missing"), (int, "c"), (float, "d"), (bool, "e"), (str, "e")):
        with pytest.raises(CheckpointError, match=f"config.json.*{key}.*again"):
            reader.get(kind, key)
    with pytest.raises(CheckpointError, match="at least 1"):
        reader.positive("f")


def test_null_counts_as_missing_and_whole_numbers_pass_as_floats():
    reader = ConfigReader({"b": None, "e": 3}, "config.json")
    assert reader.get(int, "b", 7) == 7
    assert reader.get(float, "e") == 3.0


def test_fields_find_their_part_by_name():
    wider = MIXTRAL.with_fields(num_kv_heads=4, num_experts=16, eps=1e-6, hidden_size=512)
    assert (wider.attention.num_kv_heads, wider.routing.num_experts, wider.norms.eps, wider.hidden_size) == (
        4,
        16,
        1e-6,
        512,
    )
    assert wider.with_fields(num_kv_heads=8, num_experts=8, eps=1e-5, hidden_size=4096) == MIXTRAL
    with pytest.raises(TypeError, match="num_hats"):
        MIXTRAL.with_fields(num_hats=1)
    with pytest.raises(TypeError, match="head_dim"):
        ModelConfig.from_fields(model_type="llama", num_heads=1, num_kv_heads=1, rope=None)
