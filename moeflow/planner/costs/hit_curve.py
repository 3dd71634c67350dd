"""The share of chosen experts that are read from disk, by the share of experts that are not in memory.

A curve comes from replayed routing, or is assumed. Searches use straight pieces, so a curve is made convex from below:
a mixture of its points reaches each value in between.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec


class HitCurve(msgspec.Struct, frozen=True):
    """Points (share of experts on disk, share of choices that miss), ascending from (0, 0), convex."""

    points: tuple[tuple[float, float], ...] = ((0.0, 0.0), (1.0, 1.0))  # routers that choose evenly and independently

    @classmethod
    def through(cls, measured: Iterable[tuple[float, float]]) -> HitCurve:
        """Return the largest convex curve below measured points and through (0, 0) and (1, 1)."""
        hull: list[tuple[float, float]] = []
        inner = {(x, y) for x, y in measured if 0 < x < 1}
        for x, y in sorted({(0.0, 0.0), (1.0, 1.0), *inner}):
            while len(hull) >= 2 and _turns_right(hull[-2], hull[-1], (x, y)):
                hull.pop()
            hull.append((x, y))
        return cls(tuple(hull))

    def misses(self, on_disk: float) -> float:
        """Return the share of choices that miss."""
        return max((y + slope * (on_disk - x) for x, y, slope in self.pieces), default=0.0)

    @property
    def pieces(self) -> list[tuple[float, float, float]]:
        """Straight lines whose maximum is the curve: (x, y, slope)."""
        pairs = zip(self.points, self.points[1:], strict=False)
        return [(x0, y0, (y1 - y0) / (x1 - x0)) for (x0, y0), (x1, y1) in pairs if x1 > x0]


EVEN: Final = HitCurve()


def _turns_right(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> bool:
    return (b[0] - a[0]) * (c[1] - a[1]) <= (b[1] - a[1]) * (c[0] - a[0])
