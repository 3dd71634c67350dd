"""What the roofline figures hold and draw, against MoE-Lightning's equations written out for round machines."""

from __future__ import annotations

import dataclasses

import pytest
from matplotlib.figure import Figure

from moeflow.bench.plan_plots import draw_roofline
from moeflow.core.plan import Policy
from moeflow.planner.costs.roofline import Roofs
from moeflow.planner.figures.roofline_figures import roofline_figures, turns
from tests.planner.examples import machine, routing, small_model

# The small model in 16 bits: hidden 512, 4 layers, heads 8 on 2 of 64. It has 8 experts of 3 x 512 x 512, 2 a token.
EXPERT = 3 * 512 * 512 * 2  # bytes
OTHERS = (512 * 64 * 12 + 512 * 512 + 512 * 8) * 2  # of a layer
LAYER = 8 * EXPERT + OTHERS
CONTEXT = 100 + 21 / 2
KV = 2 * 2 * 64 * 2  # bytes of a token in a layer
ON_DEVICE = Policy(batch_size=64, micro_batch=16, attention_on_device=True, ffn_on_device=True)


def distinct(tokens):
    return 8 * (1 - 0.75**tokens)


def on_device(**changes):
    model = small_model(machine(ram=10**9, device=10**9))
    return roofline_figures(model, dataclasses.replace(ON_DEVICE, **changes))


def test_experts_that_stream_lie_under_the_link_by_what_comes_over_it():
    weights = 0.5
    _, experts = on_device(weights_on_device=weights)
    flops = 64 * 2 * 2 * 3 * 512 * 512  # of a layer: tokens, experts of each, multiply and add
    streamed = 8 * EXPERT - (weights * LAYER - OTHERS)  # what else a layer has stays first
    read = distinct(16) * EXPERT  # in a micro-batch
    at = experts.operating
    assert at.far_intensity == pytest.approx(flops / streamed)
    assert at.near_intensity == pytest.approx(flops / 4 / read)
    compute_s = 4 * max(read / 1e11, flops / 4 / 1e13)
    assert at.flops_per_s == pytest.approx(flops / max(compute_s, streamed / 1e9))  # equations 7 and 12
    assert at.flops_per_s == pytest.approx(1e9 * at.far_intensity)  # a slow link: the point is on its roof


def test_what_stays_on_the_device_is_bound_by_the_device_alone():
    attention, experts = on_device(weights_on_device=1.0, kv_on_device=1.0)
    for figure, intensity in ((attention, 4 * 8 * 64 / KV), (experts, 16 * 2 * 2 / 2 / distinct(16))):
        at = figure.operating
        assert at.far_intensity is None
        assert at.near_intensity == pytest.approx(intensity)
        assert at.flops_per_s == pytest.approx(min(1e13, 1e11 * intensity))  # equation 8
        assert at.flops_per_s > 10 * figure.roofs.link * intensity  # far above the link's roof


def test_keys_and_values_that_stay_are_not_counted_as_coming():
    attention, _ = on_device(kv_on_device=0.75)
    assert attention.operating.near_intensity == pytest.approx(4 * 8 * 64 / KV)
    assert attention.operating.far_intensity == pytest.approx(4 * 4 * 8 * 64 / KV)


def test_attention_of_the_host_lies_under_the_hosts_roof():
    attention, _ = on_device(attention_on_device=False)
    at, intensity = attention.operating, 4 * 8 * 64 / KV
    assert (at.near_intensity, at.far_intensity) == (None, pytest.approx(intensity))
    assert at.flops_per_s == pytest.approx(min(1e11, 1e10 * intensity))
    assert [(mark.name, mark.intensity) for mark in attention.marks] == [
        ("K and V in float32", pytest.approx(intensity / 2)),
        ("K and V in bfloat16", pytest.approx(intensity)),
        ("K and V in int8", pytest.approx(2048 / (2 * 2 * (64 + 4)))),  # a scale of 4 bytes a head
    ]


def test_turning_points_and_balance_are_those_of_the_equations():
    _, experts = on_device()
    first, second = experts.turns
    near = 16 * 2 * 2 * EXPERT / 2 / (distinct(16) * EXPERT)
    assert (first.name, first.intensity, first.flops_per_s) == ("P1", pytest.approx(1e11 / 1e9), 1e11)  # 9
    assert second.name == "P2 = balance"  # the device's memory is its bound
    assert second.intensity == pytest.approx(1e11 * near / 1e9)  # 10 and 11
    assert second.flops_per_s == pytest.approx(1e11 * near)


def test_no_balance_is_drawn_where_the_near_level_computes_at_its_peak():
    over = Roofs(peak=100.0, bandwidth=10.0, far_peak=5.0, far_bandwidth=4.0, link=2.0)
    (first, second), (_, third) = turns(over, 3.0), turns(over, 30.0)
    assert (first.intensity, first.flops_per_s) == (5 / 2, 5.0)
    assert (second.name, second.intensity, second.flops_per_s) == ("P2 = balance", 10 * 3 / 2, 30.0)
    assert (third.name, third.intensity, third.flops_per_s) == ("P2", 100 / 2, 100.0)
    slow = dataclasses.replace(over, far_bandwidth=1.0)  # nothing is gained by computing there at any intensity
    assert [turn.name for turn in turns(slow, 3.0)] == ["P2 = balance"]


def test_several_devices_multiply_roofs_but_not_a_link_they_share():
    model = small_model(machine(ram=10**9, device=10**9, num_devices=2), num_devices=2)
    shared = roofline_figures(model, dataclasses.replace(ON_DEVICE, num_devices=2))[1].roofs
    assert (shared.peak, shared.bandwidth, shared.link) == (2e13, 2e11, 1e9)
    own = tuple(dataclasses.replace(link, is_shared=False) for link in model.machine.links)
    model = dataclasses.replace(model, machine=dataclasses.replace(model.machine, links=own))
    assert roofline_figures(model, dataclasses.replace(ON_DEVICE, num_devices=2))[1].roofs.link == 2e9


def test_a_host_alone_reads_from_memory_and_only_what_misses_from_disk():
    learnt = routing(decode=(0.05, 0.1, 0.25, 0.5, 0.9))
    model = small_model(machine(ram=10**9), overlap=0.0, routing=learnt)
    policy = Policy(batch_size=8, micro_batch=8, attention_on_device=False, ffn_on_device=False)
    attention, experts = roofline_figures(model, policy)
    flops = 8 * 2 * EXPERT
    assert attention.operating.far_intensity is None
    assert experts.operating.far_intensity is None
    assert experts.operating.near_intensity == pytest.approx(flops / (distinct(8) * EXPERT))
    half = dataclasses.replace(policy, experts_on_disk=0.5)
    read = 0.25 * distinct(8) * EXPERT
    streamed = roofline_figures(model, half)[1].operating
    assert streamed.far_intensity == pytest.approx(flops / read)
    compute_s = max(distinct(8) * EXPERT / 1e10, flops / 1e11)
    assert streamed.flops_per_s == pytest.approx(flops / (compute_s + model.predict(half).busy["disk"] / 4))


@pytest.mark.parametrize("weights", [0.5, 1.0])
def test_the_picture_shows_these_numbers_and_says_what_they_mean(weights):
    _, experts = on_device(weights_on_device=weights)
    axes = Figure().subplots()
    draw_roofline(axes, experts)
    drawn = {line.get_label().replace("\n", " "): line.get_xydata() for line in axes.lines}
    stars = {label: points for label, points in drawn.items() if label.startswith("as planned")}
    at = experts.operating
    expected = [[at.near_intensity, at.flops_per_s]]
    if weights < 1:
        expected.append([at.far_intensity, at.flops_per_s])
    assert [points.tolist() for points in stars.values()] == [[pair] for pair in expected]
    assert any("nothing comes from memory" in label for label in stars) == (weights == 1)
    for turn in experts.turns:
        label = next(label for label in drawn if label.startswith(f"{turn.name}, "))
        assert drawn[label].tolist() == [[turn.intensity, turn.flops_per_s]]
        assert turn.meaning in label
    for label, rate in (("device memory is read", 1e11), ("memory to device memory", 1e9), ("memory is read", 1e10)):
        roof = next(points for name, points in drawn.items() if name.startswith(label))
        assert roof[:, 1] == pytest.approx(rate * roof[:, 0])
    assert [text.get_text() for text in axes.texts if text.get_text().startswith("batch")] == [
        f"batch of {size}" for size in (1, 4, 16, 64, 256, 1024)
    ]
