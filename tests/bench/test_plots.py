"""What pictures show, read from the figures before they become files."""

from __future__ import annotations

import random

import pytest
from matplotlib.collections import LineCollection, PathCollection
from matplotlib.colors import rgb_to_hsv, to_rgb

from moeflow.bench import plots
from moeflow.bench.metrics import percentile


@pytest.fixture
def figure(monkeypatch, tmp_path):
    """Draw, and return the figure instead of saving it."""
    drawn = []
    monkeypatch.setattr(plots, "save", lambda figure, file: drawn.append(figure))

    def draw(plot, *arguments):
        plot(*arguments, tmp_path / "picture.png")
        return drawn.pop()

    return draw


def requests(num_requests, seed):
    rng = random.Random(seed)
    new = [rng.randrange(1, 128) for _ in range(num_requests)]
    return {"prompt": [8] * num_requests, "new": new, "latency_s": [one / 10 + rng.random() for one in new]}


def test_latencies_are_dots_and_quantiles_and_nothing_joins_them(figure):
    runs = {"continuous": [requests(60, seed=1)], "static": [requests(60, seed=2)]}
    axis = figure(plots.plot_latencies, runs, 4.0).axes[1]
    dots = [one for one in axis.collections if isinstance(one, PathCollection)]
    bars = [one for one in axis.collections if isinstance(one, LineCollection)]
    assert [len(one.get_offsets()) for one in dots] == [60, 60]
    assert axis.lines == [] or list(axis.lines) == []
    assert len(bars) == 2 * 6 * 2  # systems, ranges of length, quantiles
    ordered = sorted(zip(runs["continuous"][0]["new"], runs["continuous"][0]["latency_s"], strict=True))[:10]
    heights = [bar.get_segments()[0][0][1] for bar in bars[:2]]
    assert heights == [percentile([latency for _, latency in ordered], percent) for percent in (50, 90)]


def test_systems_of_any_name_have_colours_of_their_own(figure):
    runs = {name: [requests(30, seed=1)] for name in ("mine", "theirs", "others")}
    drawn = figure(plots.plot_latencies, runs, 4.0)
    colours = {tuple(dot.get_facecolor()[0]) for dot in drawn.axes[0].collections if isinstance(dot, PathCollection)}
    assert len(colours) == 3
    assert len(drawn.legends[0].texts) == 3


def test_too_few_requests_are_one_range(figure):
    axis = figure(plots.plot_latencies, {"continuous": [requests(5, seed=1)]}, 4.0).axes[0]
    assert sum(isinstance(one, LineCollection) for one in axis.collections) == 2


def test_each_predictor_has_a_column_with_few_lines_and_the_picture_a_title(figure):
    names = [(policy, predictor) for policy in ("fifo", "lru", "lfu", "lfru") for predictor in ("none", "perfect")]
    lines = {name: [(60, 0.2, 5.0), (120, 0.4, 9.0)] for name in (*names, ("belady", "none"))}
    drawn = figure(plots.plot_cache_replay, lines, 240, "routing.moe on a disk")
    assert drawn.get_suptitle() == "routing.moe on a disk"
    assert [axis.get_title() for axis in drawn.axes[:2]] == ["predictor: none", "predictor: perfect"]
    assert [len(axis.lines) for axis in drawn.axes] == [5] * 4
    assert list(drawn.axes[0].lines[0].get_xdata()) == [25, 50]
    assert list(drawn.axes[2].lines[0].get_ydata()) == [5.0, 9.0]


def test_idle_time_is_calmer_than_any_work():
    def saturation(colour):
        return rgb_to_hsv(to_rgb(colour))[1]

    for colour in (plots.IDLE_FACE, plots.IDLE_HATCH):
        assert all(saturation(colour) < saturation(work) for work in plots.TASK_COLOURS.values())
