"""Layers are cut so that no stage has more to hold and to compute than it must."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeflow.core.attention_config import AttentionKind, HeadSizes
from moeflow.core.errors import ConfigError
from moeflow.planner.choices.stage_choice import balanced, choose_stages
from moeflow.planner.costs.model_costs import Formats, ModelCosts
from moeflow.settings.settings import Settings
from tests.shapes import MIXTRAL

FORMATS = Formats(matrices="int8", embeddings="int8", kv="float32")


def cut(shape, stages, formats=FORMATS):
    return choose_stages(Settings(stages=stages), ModelCosts(shape, formats)).num_layers


@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.integers(0, 40), st.data())
def test_no_other_cut_has_a_smaller_greatest_load(layers, first, data):
    borders = sorted(data.draw(st.sets(st.integers(1, len(layers) - 1)))) if len(layers) > 1 else []
    number = data.draw(st.integers(1, len(borders) + 1))

    def greatest(bounds):
        loads = [sum(layers[start:stop]) for start, stop in pairwise(bounds)]
        return max(loads[0] + first, *loads)

    cuts = [(0, *inner, len(layers)) for inner in combinations(borders, number - 1)]
    counts = balanced(layers, first, number, borders)
    bounds = [sum(counts[:stage]) for stage in range(number + 1)]
    assert set(bounds[1:-1]) <= set(borders)
    assert bounds[-1] == len(layers)
    assert greatest(bounds) == min(greatest(bounds) for bounds in cuts)


def test_layers_that_are_alike_are_divided_evenly():
    assert cut(MIXTRAL, "2") == (16, 16)
    assert cut(replace(MIXTRAL, num_layers=31), "3") == (10, 10, 11)  # the first has the embeddings, too


def test_a_large_vocabulary_and_dense_layers_count():
    wide = replace(MIXTRAL, vocab_size=4_000_000, num_layers=8)
    assert cut(wide, "2")[0] < 4
    assert (
        cut(wide, "2", replace(FORMATS, embeddings="int4"))[0]
        > cut(wide, "2", replace(FORMATS, embeddings="float32"))[0]
    )
    light = MIXTRAL.with_fields(num_layers=8, dense_layers=(0, 1, 2), dense_intermediate_size=1024)
    assert cut(light, "2")[0] > 4


def test_layers_by_hand_stay_as_they_are():
    assert cut(MIXTRAL, "10,22") == (10, 22)


SHARING = MIXTRAL.with_fields(
    num_layers=6,
    layer_kinds=tuple(
        AttentionKind(
            MIXTRAL.attention.rope,
            None,
            HeadSizes(MIXTRAL.attention.num_kv_heads, MIXTRAL.attention.head_dim, kv_layer=kv_layer),
        )
        for kv_layer in (None, None, None, None, 3, 2)
    ),
)


def test_layers_stay_with_those_whose_keys_they_attend_to():
    assert SHARING.stage_borders == (1, 2)
    assert cut(SHARING, "2") == (2, 4)
    assert cut(SHARING, "3") == (1, 1, 4)
    assert cut(SHARING, "1,5") == (1, 5)
    with pytest.raises(ConfigError, match=r"4 stages .* attend to keys and values of earlier ones. Use at most 3"):
        cut(SHARING, "4")
    with pytest.raises(ConfigError, match=r"cut before layer 3 .* Cut before one of 1, 2"):
        cut(SHARING, "1,2,3")


@pytest.mark.parametrize("stages", [None, "1"])
def test_one_stage_is_none(stages):
    assert choose_stages(Settings(stages=stages), ModelCosts(MIXTRAL, FORMATS)) is None
