"""Lines that several pictures of studies have."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes


def draw_spreads(axis: Axes, points: Mapping[float, Sequence[float]], **style: Any) -> None:
    """Draw the median of the values at each place, with bars from the smallest to the largest."""
    places = sorted(points)
    middles = [statistics.median(points[place]) for place in places]
    below = [middle - min(points[place]) for place, middle in zip(places, middles, strict=True)]
    above = [max(points[place]) - middle for place, middle in zip(places, middles, strict=True)]
    axis.errorbar(places, middles, [below, above], marker="o", capsize=3, **style)
