"""Figures of frames while an answer streams, by hand; and a short stream in a browser."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from studies.browser import MISSING, find_browser
from studies.page_streaming import frame_figures
from studies.page_streaming_table import table
from tests.bench.examples import streaming_record

ROOT = Path(__file__).parent.parent.parent


def test_a_quarter_is_a_row():
    first, last = table(streaming_record()).rows
    assert first[:7] == ("quarter 1", "50.0", "16.7", "33.4", "60.0", "25.0%", "2 (130 ms)")
    assert first[7:] == ("28.0%", "5.0%", "2.0%", "3.0%", "1200")
    assert last[0] == "all"


def test_frames_between_two_moments():
    """Gaps of 10, 10, 30 and 10 ms; the times before and after do not count."""
    figures = frame_figures([0.0, 100.0, 110.0, 120.0, 150.0, 160.0, 900.0], 100.0, 180.0)
    assert figures == {"frames_per_s": 50.0, "median_ms": 10.0, "p99_ms": 30.0, "worst_ms": 30.0, "late_share": 0.25}


@pytest.mark.browser
@pytest.mark.thorough
@pytest.mark.skipif(find_browser() is None, reason=MISSING)
def test_a_short_stream(tmp_path):
    out = tmp_path / "out.jsonl"
    command = [sys.executable, "studies/page_streaming.py", "--tokens", "400", "--rate", "200", "--out", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (record,) = map(json.loads, out.read_text().splitlines())
    assert [row["name"] for row in record["quarters"]] == ["quarter 1", "quarter 2", "quarter 3", "quarter 4", "all"]
    assert record["quarters"][-1]["seconds"] >= 2
    assert all(0 < row["busy_share"] <= 1.01 and row["frames_per_s"] > 0 for row in record["quarters"])
    assert record["quarters"][0]["num_nodes"] < record["quarters"][3]["num_nodes"]
    assert len(table(record).rows) == 5
