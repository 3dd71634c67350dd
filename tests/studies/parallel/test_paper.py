"""The sliced experts paper's figures from records: by hand, and that each has its settings."""

from __future__ import annotations

import pytest

from studies.parallel.paper_figures import Setting
from studies.parallel.paper_points import EXPERTS, FIGURES, points_of
from studies.parallel.paper_tables import FASTER, paper_tables
from studies.parallel.published_layouts import DEEPSPEED


def layer(wall_s, **sections):
    return {"wall_s": wall_s, "processor_s": 2.0, "sections": sections}


def passes(wall_s):
    return {"wall_s": wall_s, "processor_s": 1.0}


def ranks(*encoder_s, decoder_s=1.0):
    """Two ranks; the second one's layers take half as long."""
    return [
        {
            "encode": passes(share * sum(encoder_s)),
            "decode": passes(share * decoder_s),
            "encoder": [layer(share * it, experts=share * it, sums=0.5) for it in encoder_s],
            "decoder": [[layer(share * decoder_s, experts=share * decoder_s, sums=0.5)] * len(encoder_s)],
        }
        for share in (1.0, 0.5)
    ]


def record(**point):
    runs = {arm: [ranks(1.0, 2.0), ranks(3.0, 2.0)] for arm in FASTER}
    runs[DEEPSPEED] = [ranks(8.0, 4.0, decoder_s=3.0)]
    made = {"figures": list(FIGURES), "num_experts": 8, **point}
    return {"point": made, "size": "tiny", "num_layers": 4, "num_ranks": 2, "num_cores": 1, "runs": runs}


def test_figures_are_those_of_the_slowest_rank():
    it = Setting(record())
    assert (it.encoder_s("sliced"), it.encoder_s("sliced", "processor_s")) == (4.0, 1.0)
    assert it.layer_times("sliced", is_encoder=True) == [[1.0, 3.0], [2.0, 2.0]]
    assert it.speed_up("sliced") == pytest.approx((8 / 2 + 4 / 2) / 2)
    assert it.speed_up("sliced", has_decoder=True) == pytest.approx((8 / 2 + 4 / 2 + 3 + 3) / 4)
    assert it.speed_up("sliced", clock="processor_s") == 1.0
    mean, deviation = it.sections("sliced", is_encoder=True, layer=0)["experts"]
    assert mean == pytest.approx((0.75 + 2.25) / 2)
    assert deviation == pytest.approx(((0.25**2 + 0.75**2) / 2) ** 0.5)


def test_every_figure_has_settings_and_a_table():
    points = points_of(FIGURES, 256)
    assert {figure for point in points for figure in point.figures} == set(FIGURES)
    assert {point.num_experts for point in points if "6.2" in point.figures} == {8, 16, 32, 64, EXPERTS, 256}
    text = "".join(table.to_markdown() for table in paper_tables([record(), record(num_experts=256)]))
    assert all(f"Figure {figure}" in text for figure in FIGURES[:-1])
    assert "Whole encoder" in text
    assert "2 ranks of one thread, oversubscribed: 1 cores" in text
    assert "256 experts, grouped: 2.94" in text
