"""Figures and tables of times for easy arithmetic."""

from __future__ import annotations

import pytest

from moeflow.parallel.placement.layouts import CAPACITY_DROPLESS
from studies.parallel.figures import figures_of, speed_ups, to_fields
from studies.parallel.plots import plot_parallel
from studies.parallel.rank import RankRun
from studies.parallel.tables import parallel_tables
from tests.bench.examples import parallel_record


def rows_of(table) -> dict[str, tuple[str, ...]]:
    return {first: rest for first, *rest in table.rows}


def test_the_critical_path_is_the_sum_of_the_slowest_and_others_wait():
    figures = figures_of(parallel_record())
    padded, sliced = figures[CAPACITY_DROPLESS], figures["sliced"]
    assert padded.critical_s.tolist() == pytest.approx([0.016, 0.012])  # 1 + 2 + 10 + 3, 1 + 2 + 6 + 3
    assert sliced.critical_s.tolist() == pytest.approx([0.008, 0.008])
    assert speed_ups(figures, "sliced") == pytest.approx([2.0, 1.5])
    assert padded.work_s.tolist() == pytest.approx([0.012, 0.010])  # medians: 1 + 2 + 8 + 1 and 1 + 2 + 4 + 3
    assert padded.work_imbalance == pytest.approx(12 / 11)
    assert padded.idle_shares.tolist() == pytest.approx([1 - 12 / 14, 1 - 10 / 14])
    assert sliced.work_imbalance == 1
    assert sliced.idle_shares.tolist() == [0, 0]
    assert sliced.predicted_work_ratios.tolist() == pytest.approx([0.5, 1.0])


def test_fields_hold_every_repeat_and_rank():
    def run(experts_s, wall_s, *, is_equal=None, error=None):
        seconds = {"route": 1.0, "dispatch": 2.0, "experts": experts_s, "combine": 4.0}
        return RankRun(seconds, wall_s, 7, 1, is_equal, error)

    runs = [[run(3.0, 5.0, is_equal=True, error=0.0), run(6.0, 9.0, is_equal=False, error=0.5)], [run(3.5, 8.0)] * 2]
    fields = to_fields(runs, 8, None)
    assert fields["seconds"] == [[[1, 2, 3, 4], [1, 2, 6, 4]], [[1, 2, 3.5, 4]] * 2]
    assert (fields["wall_s"], fields["sent_bytes"], fields["dropped_share"]) == ([9, 8], [7, 7], 0.25)
    assert (fields["is_equal"], fields["error"]) == (False, 0.5)
    assert "predicted_s" not in fields


def test_a_single_case_is_told_in_full():
    layouts, sections, validation = parallel_tables([parallel_record()])
    assert layouts.title == (
        "8 experts, skew 0.6, 1,024 tokens a rank: 2 ranks, top 1, experts of two matrices 768 x 3072, bfloat16"
    )
    assert rows_of(layouts)["sliced"] == ["8 ms", "1.8 (1.5-2.0)", "1.00", "0% ± 0%", "3.0 KiB", "0.0%", "30 ms"]
    assert rows_of(layouts)["capacity-dropless"][:4] == ["14 ms", "1.0 (1.0-1.0)", "1.09", "21% ± 7%"]
    assert layouts.columns[-1] == "wall time"
    assert "Sums equal one process's to the bit: capacity-dropless." in layouts.notes
    assert any(note.startswith("sliced adds partial sums") and "2e-07" in note for note in layouts.notes)
    assert rows_of(sections)["capacity-dropless"] == ["1.00 ± 0.00", "2.00 ± 0.00", "6.00 ± 2.00", "2.00 ± 1.00"]
    assert rows_of(validation)["sliced"] == ["1.00", "1.00", "0.62", "0.75", "0.75 (0.50-1.00)"]
    assert validation.notes == (
        "Predicted and measured work of a rank differ by 0% in the median, 50% at most; "
        "by section: route 0%, dispatch 0%, experts 0%, combine 0%. The machine was measured 2026-01-31.",
    )


def test_without_a_core_for_each_rank_or_a_prediction_there_is_less_to_tell():
    record = parallel_record(num_cores=1)
    for fields in record["layouts"].values():
        del fields["predicted_s"]
    tables = parallel_tables([record])
    assert len(tables) == 2
    assert "wall time" not in tables[0].columns


def test_a_grid_has_a_row_a_case_and_says_how_steady_slices_are():
    slower = parallel_record(router_skew=0.9)
    fields = slower["layouts"]["sliced"]
    fields["seconds"] = [[[2 * s for s in rank] for rank in repeat] for repeat in fields["seconds"]]
    speed, work, _, validation = parallel_tables([parallel_record(), slower])
    assert rows_of(speed) == {
        "8 experts, skew 0.6, 1,024 tokens": ["1.00 (1.00-1.00)", "1.75 (1.50-2.00)"],
        "8 experts, skew 0.9, 1,024 tokens": ["1.00 (1.00-1.00)", "0.88 (0.75-1.00)"],
    }
    assert rows_of(work)["8 experts, skew 0.6, 1,024 tokens"] == ["1.09", "1.00"]
    assert validation.columns == ("", "capacity-dropless", "sliced")
    assert "Critical paths of sliced lie within 33.3% of their mean over the skews." in validation.notes


@pytest.mark.slow
@pytest.mark.parametrize("num_cases", [1, 3])
def test_pictures_are_drawn(tmp_path, num_cases):
    records = [parallel_record(router_skew=skew / 4) for skew in range(num_cases)]
    plot_parallel(records, tmp_path / "new" / "picture.png")
    assert (tmp_path / "new" / "picture.png").stat().st_size > 5000
