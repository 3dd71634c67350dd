"""What MoE-Lightning published is what the simulator has to come near, whatever becomes of its costs."""

from __future__ import annotations

import pytest

from benchmarks.paper_settings import BAR, CELLS, is_ranked_right, predict


@pytest.mark.slow  # some seconds for tens of thousands of tasks
@pytest.mark.parametrize("cell", [pytest.param(cell, id=cell.title) for cell in CELLS])
def test_systems_are_ranked_as_published_and_within_the_bar(cell):
    predicted = [predict(cell, row).tokens_per_s for row in cell.rows]
    assert is_ranked_right(cell, predicted)
    for row, speed in zip(cell.rows, predicted, strict=True):
        assert speed == pytest.approx(row.tokens_per_s, rel=BAR), row.system.name
