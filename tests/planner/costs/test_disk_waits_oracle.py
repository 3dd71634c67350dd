"""Curves of misses against brute force, what reading costs a pass against sums by hand and a drawn lot."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeflow.core.hardware import Link, LinkRate
from moeflow.experts.disk_reader import READ_DEPTHS
from moeflow.kernels.cpu import extension
from moeflow.planner.costs.disk_waits import NUM_READERS, PIECE_BYTES, DiskRates, ExpertReads
from moeflow.planner.costs.hit_curve import EVEN, HitCurve
from moeflow.planner.costs.routing_profile import SHARES_ON_DISK, PassReads, RoutingProfile

STOP_S, LOAD_S = 0.003, 0.0007
percent = st.integers(0, 100).map(lambda number: number / 100)


def disk(read_s):
    """Return a disk from which each expert takes so long, however many are asked for."""
    rates = (LinkRate(transfer_bytes=1, bytes_per_s=1000.0 / read_s),) if read_s else ()
    link = Link(source="disk", target="ram", rates=rates) if read_s else None
    return DiskRates(link=link, expert_bytes=1000.0)


def reads_of(*, read_s, stop_s=STOP_S, load_s=LOAD_S, **fields):
    return ExpertReads(rates=disk(read_s), stop_s=stop_s, load_s=load_s, **fields)


def lowest_mixture(points, x):
    """Brute force: the least that a mixture of two points gives at x; a convex curve through them is just that."""
    corners = [(0.0, 0.0), (1.0, 1.0), *((a, b) for a, b in points if 0 < a < 1)]
    found = [y for a, y in corners if a == x]
    for (a, low), (b, high) in itertools.product(corners, repeat=2):
        if a < x < b:
            found.append(low + (high - low) * (x - a) / (b - a))
    return min(found)


@given(st.lists(st.tuples(percent, percent), max_size=7), percent)
def test_a_hit_curve_is_the_least_mixture_of_its_points(points, x):
    curve = HitCurve.through(points)
    assert curve.misses(x) == pytest.approx(lowest_mixture(points, x))
    for x0, y0, slope in curve.pieces:
        assert (x0, y0) in curve.points
        assert curve.misses(x) >= y0 + slope * (x - x0) - 1e-12


def test_a_curve_by_hand():
    curve = HitCurve.through([(0.8, 0.5), (0.4, 0.1), (0.6, 0.5)])
    assert curve.points == ((0.0, 0.0), (0.4, 0.1), (0.8, 0.5), (1.0, 1.0))  # 0.6 lies above: 0.3 is a mixture
    assert [slope for _, _, slope in curve.pieces] == pytest.approx([0.25, 1.0, 2.5])
    assert (curve.misses(0.2), curve.misses(0.6)) == pytest.approx((0.05, 0.3))
    assert EVEN.misses(0.37) == pytest.approx(0.37)


def test_what_a_pass_reads_and_waits_by_hand():
    """Ten layers, four experts used of eight that even routers would; at half of them on disk, a quarter is read."""
    curve = HitCurve.through([(0.5, 0.25)])
    reads = reads_of(num_layers=10, distinct=4.0, even=8.0, misses=curve, read_s=0.01)
    assert reads.num_read(0.5) == 10 * 2
    assert reads.num_read(0.0) == 0
    assert reads.num_read(1.0) == 10 * 4  # no more than are used
    assert reads.num_read(0.75) == 10 * 4
    # Two of four are there on average: a layer has all four with 1/16, and stops otherwise.
    assert reads.wait_s(20.0) == pytest.approx(20 * (0.01 + LOAD_S) + 10 * 15 / 16 * STOP_S)
    assert reads.wait_s(40.0) == pytest.approx(40 * (0.01 + LOAD_S) + 10 * STOP_S)
    assert reads.wait_s(80.0) == pytest.approx(80 * (0.01 + LOAD_S) + 10 * STOP_S)
    assert reads.wait_s(0.0) == 0.0
    nobody = reads_of(num_layers=10, distinct=0.0, even=0.0, misses=curve, read_s=0.01)
    assert nobody.wait_s(3.0) == 0.0
    assert nobody.waits.all_on_disk_s == 0.0
    assert nobody.waits.curve == curve


def test_a_layer_stops_as_often_as_a_drawn_lot_lacks_something():
    """Of ten equal and independent chances, all 2**3 outcomes for three experts, each there with 0.6."""
    outcomes = itertools.product((True, False), repeat=3)
    complete = sum(math.prod(0.6 if it else 0.4 for it in one) for one in outcomes if all(one))
    reads = reads_of(num_layers=10, distinct=3.0, even=3.0, misses=EVEN, read_s=0.0, stop_s=1.0)
    stops = reads.wait_s(reads.num_read(0.4)) - reads.num_read(0.4) * LOAD_S
    assert stops == pytest.approx(10 * (1 - complete))


MIB = 2**20
DEPTHS = {1: 1.0, 2: 1.5, 4: 3.0, 8: 4.0, 16: 4.5}  # MiB a millisecond, by reads under way


@pytest.mark.parametrize(
    ("expert_mib", "at_once", "rate"),
    [
        (1.5, 1.0, 1.0),  # not cut: less than two pieces
        (1.5, 2.0, 1.5),
        (2.0, 1.0, 1.5),  # two pieces
        (4.5, 1.0, 3.0),
        (4.5, 2.4, 4.5),  # two, each in four: all readers are busy, so the best depth is the chosen one
        (20.0, 1.0, 4.5),  # eight pieces
        (20.0, 3.0, 4.0),  # three experts, two readers each: six reads are under way, and eight are nearest
        (20.0, 30.0, 4.5),
        (20.0, 0.2, 4.5),  # one, where one is asked for
    ],
)
def test_experts_come_as_fast_as_so_many_reads_do(expert_mib, at_once, rate):
    rates = tuple(
        LinkRate(transfer_bytes=MIB, bytes_per_s=speed * MIB * 1000, depth=depth) for depth, speed in DEPTHS.items()
    )
    found = DiskRates(link=Link(source="disk", target="ram", rates=rates), expert_bytes=expert_mib * MIB)
    assert found.read_s(at_once) == pytest.approx(expert_mib / rate / 1000)


@pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
def test_reads_are_cut_as_the_reader_cuts_them():
    assert READ_DEPTHS[0] == NUM_READERS
    assert PIECE_BYTES == extension._cpu.MIN_PIECE_BYTES


def test_waits_are_a_curve_through_what_the_replayed_shares_cost():
    reads = reads_of(num_layers=2, distinct=3.0, even=3.0, misses=EVEN, read_s=0.5, stop_s=0.0)
    waits = reads.waits
    assert waits.all_on_disk_s == pytest.approx(6 * (0.5 + LOAD_S))
    for share in (*SHARES_ON_DISK, 0.2):  # without stops, a share of experts costs its share
        assert waits.curve.misses(share) == pytest.approx(share)
    with_stops = reads_of(num_layers=2, distinct=3.0, even=3.0, misses=EVEN, read_s=0.5, stop_s=9.0)
    for share in SHARES_ON_DISK:
        taken = with_stops.wait_s(with_stops.num_read(share)) / with_stops.waits.all_on_disk_s
        assert with_stops.waits.curve.misses(share) <= taken + 1e-12


def test_a_profile_by_hand():
    low, high = (0.0, 0.0, 0.1, 0.3, 0.6), (0.0, 0.1, 0.2, 0.5, 0.8)  # both convex
    profile = RoutingProfile(
        decode=(PassReads(2, 0.6, low), PassReads(32, 1.0, high)), prefill=(PassReads(8, 0.3, low),)
    )
    # 8 lies half way from 2 to 32 in the logarithm.
    assert profile.decode_distinct(8) == pytest.approx(0.8)
    assert profile.decode_misses(8).misses(0.5) == pytest.approx(0.15)
    assert profile.decode_misses(8).misses(0.9) == pytest.approx(0.7)
    assert profile.decode_misses(2).misses(0.7) == pytest.approx(0.3)
    assert profile.decode_misses(0).misses(0.7) == pytest.approx(0.3)  # below the least, as at that
    assert profile.prefill_misses(8).misses(0.5) == pytest.approx(0.1)
    assert (profile.prefill_distinct(8), profile.prefill_misses(99).misses(0.9)) == pytest.approx((0.3, 0.6))
