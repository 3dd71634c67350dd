"""Figures of Lighthouse's reports, and their table."""

from __future__ import annotations

from studies.page_load import figures
from studies.page_load_table import table
from tests.bench.examples import load_record

ZEROS = ("0.00 (0.00-0.00)", "0.000 (0.000-0.000)")


def test_a_device_is_a_row():
    phone, desktop = table(load_record()).rows
    assert phone == ("phone", "94 (92-96)", "1.25 (1.00-1.50)", *["2.00 (2.00-2.00)", "3.00 (3.00-3.00)"], *ZEROS)
    assert desktop == ("desktop", "92", "1.00", "2.00", "3.00", "0.00", "0.000")


def test_figures_of_a_report():
    times = ("first-contentful-paint", "largest-contentful-paint", "speed-index", "total-blocking-time")
    audits = {name: {"numericValue": 1000.0 * number} for number, name in enumerate(times, start=1)}
    audits["cumulative-layout-shift"] = {"numericValue": 0.25}
    assert figures({"categories": {"performance": {"score": 0.5}}, "audits": audits}) == {
        "score": 50,
        "first_contentful_paint_s": 1,
        "largest_contentful_paint_s": 2,
        "speed_index_s": 3,
        "total_blocking_time_s": 4,
        "layout_shift": 0.25,
    }
