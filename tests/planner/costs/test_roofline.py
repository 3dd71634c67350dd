from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeflow.planner.costs.model_costs import KernelWork
from moeflow.planner.costs.roofline import Roofs, roofs, work_seconds
from moeflow.planner.hardware.machine_files import load_machine

rates = st.floats(1, 1e6)


@given(rates, rates, rates, rates, rates, rates)
def test_the_points_are_where_the_equations_meet(peak, bandwidth, far_peak, far_bandwidth, link, near):
    all_roofs = Roofs(peak, bandwidth, far_peak, far_bandwidth, link)
    second = all_roofs.turning_point_2(near)
    assert link * second == pytest.approx(min(peak, bandwidth * near))
    assert link * all_roofs.balance(near) == pytest.approx(bandwidth * near)


@given(rates, rates, rates, rates)
def test_the_far_level_is_ahead_left_of_the_first_turning_point(far_peak, far_bandwidth, link, intensity):
    all_roofs = Roofs(1.0, 1.0, far_peak, far_bandwidth, link)
    first = all_roofs.turning_point_1
    if intensity != pytest.approx(first):
        assert (intensity < first) == (all_roofs.far(intensity) > link * intensity)


def test_attention_of_mixtral_belongs_on_the_host_of_an_l4():
    """Figure 4: grouped-query attention in float16 lies left of P1, in int4 too."""
    l4 = roofs(load_machine("paper-s2"), "device", "ram", "float32")
    for intensity in (4.0, 16.0):  # 32 heads on 8 of K and V: 4 operations a value of two bytes, of half a byte
        assert intensity < l4.turning_point_1
        assert l4.far(intensity) > l4.link * intensity


def test_time_is_the_slower_of_reading_and_computing_at_the_kernels_efficiency():
    device = load_machine("t4").level("device")
    processor = dataclasses.replace(device.processor, efficiencies=(), default_efficiency=0.8)
    device, launch, share = dataclasses.replace(device, processor=processor), processor.launch_s, 0.8
    reading = KernelWork("linear", "float16", 320e9, 1.0, 1, 1)
    computing = KernelWork("linear", "float16", 1.0, 65e12, 1, 1)
    assert work_seconds(device, reading) == pytest.approx(1 / share + launch)
    assert work_seconds(device, computing, 2) == pytest.approx(0.5 / share + launch)
    assert work_seconds(device, KernelWork("linear", "float16", 0.0, 0.0, 1, 1)) == 0
