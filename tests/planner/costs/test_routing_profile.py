from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeflow.planner.costs.routing_profile import (
    EVEN_ROUTING,
    SHARES_ON_DISK,
    PassReads,
    RoutingProfile,
    load_profile,
    profile_file,
    save_profile,
)

READS = st.lists(st.floats(0, 1), min_size=5, max_size=5).map(sorted).map(tuple)
PROFILE = RoutingProfile(
    decode=(PassReads(1, 1.0, (0.0, 0.1, 0.2, 0.4, 0.8)), PassReads(16, 0.5, (0.0, 0.1, 0.2, 0.3, 0.4))),
    prefill=(PassReads(128, 0.8, (0.1, 0.3, 0.4, 0.6, 0.7)),),
    num_tokens=4096,
)


def test_routers_of_which_nothing_is_known_choose_evenly():
    assert EVEN_ROUTING.decode_distinct(7) == EVEN_ROUTING.prefill_distinct(300) == 1
    assert EVEN_ROUTING.decode_misses(7).misses(0.3) == pytest.approx(0.3)


def test_sizes_in_between_lie_between_by_their_logarithm():
    assert PROFILE.decode_distinct(4) == pytest.approx(0.75)
    assert PROFILE.decode_distinct(1000) == 0.5  # the last that is known
    assert PROFILE.prefill_distinct(3) == 0.8
    assert PROFILE.decode_misses(4).misses(0.9) == pytest.approx(0.6)
    assert PROFILE.decode_misses(1).misses(0.5) == pytest.approx(0.2)


@given(READS, READS, st.floats(1, 100))
def test_a_curve_promises_no_more_than_was_seen(low, high, batch):
    profile = RoutingProfile(decode=(PassReads(1, 1.0, low), PassReads(64, 1.0, high)))
    curve = profile.decode_misses(batch)
    for share, one, other in zip(SHARES_ON_DISK, low, high, strict=True):
        assert curve.misses(share) <= max(one, other) + 1e-9


def test_what_was_kept_is_found_again(tmp_path):
    file = profile_file(tmp_path, "abc")
    assert load_profile(file) is None
    save_profile(PROFILE, file)
    assert load_profile(file) == PROFILE
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("content", [b"", b"{", b'{"decode": 3}', b'{"version": 0}', b"\xff\x00"])
def test_what_cannot_be_read_counts_as_unknown(tmp_path, content):
    file = tmp_path / "x.json"
    file.write_bytes(content)
    assert load_profile(file) is None


def test_what_could_not_be_kept_leaves_nothing_behind(tmp_path):
    file = profile_file(tmp_path, "abc")
    file.mkdir(parents=True)  # in the way
    with pytest.raises(OSError, match="abc"):
        save_profile(PROFILE, file)
    assert list(file.parent.iterdir()) == [file]
