"""How experts should lie on ranks: the fastest layout that fits by formula, why, and what twice the ranks would bring.

One pass at a time: for a chunk of prompt and for a batch that decodes, ask twice. Estimates are those of
`studies/parallel/layout_estimate.py`; only the experts of all layers count as what a rank has to hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from moeflow.core.units import format_bytes, format_seconds
from studies.parallel.layout_estimate import ExpectedLayer, LayoutEstimate, estimate_layouts


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutChoice:
    """The choice for passes of one size."""

    best: LayoutEstimate | None  # None: no layout fits
    reason: str  # with the figures that decided
    estimates: Mapping[str, LayoutEstimate]  # of all layouts, including any that do not fit
    doubled: Mapping[str, LayoutEstimate]  # the same on twice the ranks

    @property
    def text(self) -> str:
        """What was chosen and why, and what twice the ranks bring, in a line."""
        if self.best is None:
            return self.reason
        after = _fastest_first(self.doubled)[0]
        gain = self.best.seconds / after.seconds
        return f"{self.best.layout}: {self.reason}; twice the ranks would be {gain:.2f} times as fast ({after.layout})"


def choose_layout(at: ExpectedLayer, added: Sequence[str] = ()) -> LayoutChoice:
    """Return the fastest layout of those that fit; of other packages', of those that are named. Raises: ConfigError."""
    estimates = estimate_layouts(at, added)
    fitting = _fastest_first(estimates)
    return LayoutChoice(
        best=fitting[0] if fitting else None,
        reason=_reason(fitting[0], fitting[1:]) if fitting else _none_fits(at, estimates),
        estimates=estimates,
        doubled=estimate_layouts(replace(at, num_ranks=2 * at.num_ranks), added),
    )


def _fastest_first(estimates: Mapping[str, LayoutEstimate]) -> list[LayoutEstimate]:
    return sorted((one for one in estimates.values() if one.fits), key=lambda estimate: estimate.seconds)


def _none_fits(at: ExpectedLayer, estimates: Mapping[str, LayoutEstimate]) -> str:
    least = min(estimate.experts_bytes for estimate in estimates.values())
    return (
        f"no layout fits: a rank needs {format_bytes(least)} at least and has {format_bytes(at.level.capacity_bytes)}; "
        "take more ranks, or a smaller format of weights"
    )


def _reason(best: LayoutEstimate, others: Sequence[LayoutEstimate]) -> str:
    """Return how far ahead the best is of the next, and by what most."""
    if not others:
        return f"{format_seconds(best.seconds)} a layer, and no other fits"
    second = others[0]
    lost = {
        "exchanging tokens takes": (second.exchange_s - best.exchange_s, second.exchange_s),
        "the slowest rank's experts take": (second.experts_s - best.experts_s, second.experts_s),
    }
    part = max(lost, key=lambda name: lost[name][0])
    share = lost[part][1] / second.seconds
    figures = f"{format_seconds(best.seconds)} against {format_seconds(second.seconds)} {second.layout}"
    return f"{figures}, where {part} {share:.0%}"
