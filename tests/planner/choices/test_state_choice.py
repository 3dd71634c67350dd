"""How much memory recurrent states get, and after how many tokens a prefix keeps one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moeflow.core.errors import CapacityError
from moeflow.core.recurrent_config import RecurrentConfig, ShortConvConfig
from moeflow.planner.choices.state_choice import choose_states, num_state_slots
from tests.shapes import TINY

LARGE = 1 << 40


def shape_of(num_channels: int):
    return replace(TINY, recurrent=RecurrentConfig((0,), ShortConvConfig(num_channels, kernel_size=3)))


def test_models_without_recurrent_layers_keep_no_states():
    assert num_state_slots(TINY, 8, 0) == 0
    assert choose_states(TINY, 0, []) is None


def test_slots_are_for_requests_and_prefixes_within_a_share_of_the_memory():
    shape = shape_of(1000)
    assert shape.state_bytes == 8000
    assert num_state_slots(shape, 8, LARGE) == 32
    assert num_state_slots(shape, 8, LARGE, shares_prefixes=False) == 8
    assert num_state_slots(shape, 8, 8 * 10 * 8000) == 10
    assert num_state_slots(shape, 8, 8 * 2 * 8000) == 2
    with pytest.raises(CapacityError, match="recurrent state takes"):
        num_state_slots(shape, 8, 8 * 2 * 8000 - 8)


def test_states_of_a_prefix_take_about_what_its_keys_and_values_take():
    for num_channels in (1, 4000, 40_000, 10_000_000):
        shape, reasons = shape_of(num_channels), []
        states = choose_states(shape, 12, reasons)
        every, of_keys = states.checkpoint_every, shape.kv_bytes_per_token("float32")
        assert states.num_slots == 12
        assert every % 16 == 0
        assert 128 <= every <= 1024
        if 128 < every < 1024:
            assert every * of_keys / 2 < shape.state_bytes <= every * of_keys
        assert reasons == [("states", pytest.approx(reasons[0][1]))]
        assert f"every {every} tokens" in reasons[0][1]
