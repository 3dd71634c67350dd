"""How many experts stay resident, against counting one by one."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeflow.core.errors import CapacityError
from moeflow.experts.slot_arena import arena_bytes
from moeflow.planner.resident_experts import (
    device_bytes,
    min_slots,
    most_on_device,
    num_on_device,
    num_slots,
    share_on_device,
    share_on_disk,
    share_to_evict,
    slots_within,
)

MIB = 1 << 20


@pytest.mark.parametrize(("top_k", "slots"), [(1, 4), (2, 4), (3, 6), (8, 16), (20, 32)])
def test_a_token_needs_its_experts_and_the_next_layers(top_k, slots):
    assert min_slots(top_k, 32) == slots


@given(left_mib=st.integers(-5, 200), slab_bytes=st.integers(1, 9 * MIB), num_experts=st.integers(4, 40))
def test_slots_fill_what_is_left(left_mib, slab_bytes, num_experts):
    left_bytes = left_mib * MIB
    fitting = max(it for it in range(num_experts + 1) if it == 0 or arena_bytes(it, slab_bytes) <= left_bytes)
    assert num_slots(left_bytes, slab_bytes, num_experts, least=4) == max(fitting, 4)
    if fitting >= 4:
        assert slots_within(left_bytes, slab_bytes, num_experts, least=4) == fitting
    else:
        with pytest.raises(CapacityError, match=r"4 experts of .* at a time"):
            slots_within(left_bytes, slab_bytes, num_experts, least=4)


def test_too_little_memory_says_what_is_needed():
    with pytest.raises(
        CapacityError, match=r"^3\.0 MiB are left .* at least 8\.0 MiB: 4 experts of 2\.0 MiB .*--memory"
    ):
        slots_within(3 * MIB, 2 * MIB - 100, 8, least=4)


@given(num_experts=st.integers(4, 10_000), data=st.data())
def test_a_share_and_the_number_that_it_came_from_are_the_same(num_experts, data):
    resident = data.draw(st.integers(4, num_experts))
    on_disk = share_on_disk(resident, num_experts)
    assert num_on_device(1 - on_disk, num_experts) == num_on_device(1 - round(on_disk, 6), num_experts) == resident
    assert num_on_device(round(resident / num_experts, 6), num_experts) == resident


@given(expert_bytes=st.integers(1, 10**8), num_experts=st.integers(1, 5000), data=st.data())
def test_as_many_experts_go_as_make_the_room_that_is_missing(expert_bytes, num_experts, data):
    experts_bytes = expert_bytes * num_experts
    missing = data.draw(st.integers(0, experts_bytes))
    share = share_to_evict(missing, experts_bytes)
    assert Fraction(missing, experts_bytes) <= Fraction(share) + Fraction(1, 10**12)
    assert share <= missing / experts_bytes + 1.1e-6
    assert share_to_evict(-1.0, experts_bytes) == 0.0


@given(
    num_layers=st.integers(1, 60),
    num_experts=st.integers(1, 128),
    expert_bytes=st.integers(1, 1000),
    left_bytes=st.integers(-10, 5_000_000),
)
def test_a_device_holds_as_many_of_each_layer_as_leave_room_to_stream_the_others(
    num_layers, num_experts, expert_bytes, left_bytes
):
    def held(resident):  # layers hold theirs, and two layers' others are on their way
        return num_layers * resident * expert_bytes + 2 * (num_experts - resident) * expert_bytes

    fitting = [it for it in range(num_experts + 1) if held(it) <= left_bytes]
    assert most_on_device(left_bytes, num_layers, num_experts, expert_bytes) == (max(fitting) if fitting else None)
    assert device_bytes(1, num_layers, num_experts, expert_bytes) == held(1)


@given(others=st.integers(0, 1000), experts=st.integers(1, 1000), share=st.floats(0, 1))
def test_a_device_takes_the_other_weights_first(others, experts, share):
    layers = others + experts
    expected = 0 if share * layers <= others else (share * layers - others) / experts
    assert share_on_device(layers, experts, share) == pytest.approx(expected, abs=1e-9)
