"""The figures that are reported, against examples computed by hand."""

from __future__ import annotations

import pytest

from moeflow.bench.metrics import Served, Spread, describe, percentile, summarize


@pytest.mark.parametrize(
    ("percent", "expected"), [(0, 10), (20, 10), (21, 20), (50, 30), (80, 40), (81, 50), (99, 50), (100, 50)]
)
def test_percentiles_are_nearest_ranks(percent, expected):
    assert percentile([50, 20, 40, 10, 30], percent) == expected


def test_the_99th_percentile_of_a_hundred_is_the_second_largest():
    assert percentile(range(1, 101), 99) == 99
    assert percentile([7.0], 99) == 7.0


def test_a_spread_is_median_and_range():
    assert Spread.of([3.0, 1.0, 2.0, 10.0]) == Spread(2.5, 1.0, 10.0)


def test_a_run_of_three_requests_by_hand():
    """Due at 0, 1 and 2 s, with 4, 1 and 6 tokens. First tokens come after 0.5, 1 and 1.5 s, the last at 2, 3 and 4
    s."""
    served = [
        Served(at_s=0.0, first_s=0.5, end_s=2.0, num_prompt=8, num_new=4),
        Served(at_s=1.0, first_s=2.0, end_s=3.0, num_prompt=8, num_new=1),
        Served(at_s=2.0, first_s=3.5, end_s=4.0, num_prompt=8, num_new=6),
    ]
    result = summarize(served)
    assert result["num_requests"] == 3
    assert result["num_failed"] == 0
    assert result["duration_s"] == 4.0
    assert result["requests_per_s"] == pytest.approx(3 / 4)
    assert result["tokens_per_s"] == pytest.approx(11 / 4)
    assert [result[f"latency_{k}_s"] for k in ("avg", "min", "max", "p50", "p99")] == [2.0] * 5
    assert result["first_token_avg_s"] == pytest.approx(1.0)
    assert (result["first_token_min_s"], result["first_token_max_s"]) == (0.5, 1.5)
    # 1.5 s for 3 tokens after the first, 0.5 s for 5; a single token has no gap
    assert result["per_token_avg_s"] == pytest.approx((0.5 + 0.1) / 2)


def test_failed_requests_are_counted_and_left_out():
    served = [
        Served(at_s=0.0, first_s=0.5, end_s=1.0, num_prompt=8, num_new=2),
        Served(at_s=0.0, first_s=None, end_s=9.0, num_prompt=8, num_new=0, error="refused"),
    ]
    result = summarize(served)
    assert (result["num_requests"], result["num_failed"]) == (2, 1)
    assert (result["requests_per_s"], result["tokens_per_s"]) == (1.0, 2.0)


def test_a_run_in_which_all_failed_has_no_figures():
    served = [Served(at_s=0.0, first_s=None, end_s=1.0, num_prompt=8, num_new=0, error="refused")]
    assert summarize(served) == {"num_requests": 1, "num_failed": 1}
    assert describe("latency", []) == {}
