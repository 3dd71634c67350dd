"""What the text of the sliced experts paper states of each figure, and whether it holds here.

The paper draws its figures, so these sentences are the published values. A number holds if ours reaches it within a
sixth.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from studies.parallel.paper_figures import Setting
from studies.parallel.published_layouts import DEEPSPEED, GROUPED, PER_EXPERT

CLOCK: Final = "processor_s"  # of the slowest rank, which other work on the machine does not change
NEAR: Final = 1 / 1.2
ALIKE: Final = 1.25  # the largest speed-up over the smallest, where the paper finds no dependence


@dataclass(frozen=True, slots=True)
class Statement:
    """A sentence of the paper."""

    stated: str
    ours: str
    holds: bool


def _latencies(settings: Sequence[Setting]) -> list[Statement]:
    (it, *_) = settings
    grouped, per_expert = it.speed_up(GROUPED, clock=CLOCK), it.speed_up(PER_EXPERT, clock=CLOCK)
    decoder_s = {
        arm: statistics.mean(map(statistics.median, it.layer_times(arm, is_encoder=False, clock=CLOCK)))
        for arm in (DEEPSPEED, PER_EXPERT, GROUPED)
    }
    best = decoder_s[DEEPSPEED] / min(decoder_s[PER_EXPERT], decoder_s[GROUPED])
    return [
        Statement(
            "encoder layers: grouped is fastest, and both beat the baseline",
            f"grouped {grouped:.2f}, per expert {per_expert:.2f}",
            grouped > per_expert > 1,
        ),
        Statement("decoder layers: both lose to the baseline", f"the faster one: {best:.2f}", best < 1),
    ]


def _numbers_of_experts(settings: Sequence[Setting]) -> list[Statement]:
    best = max(it.speed_up(arm, clock=CLOCK) for it in settings for arm in (PER_EXPERT, GROUPED))
    found = [Statement("up to 6.84 times as fast as the baseline", f"up to {best:.2f}", best >= 6.84 * NEAR)]
    few = [
        it.speed_up(GROUPED, clock=CLOCK) / it.speed_up(PER_EXPERT, clock=CLOCK)
        for it in settings
        if it.point.num_experts <= 32
    ]
    many = [
        it.speed_up(GROUPED, clock=CLOCK) / it.speed_up(PER_EXPERT, clock=CLOCK)
        for it in settings
        if it.point.num_experts > 32
    ]
    if few:
        text = f"grouped over per expert: {_listed(few)}"
        found.append(Statement("up to 32 experts: per expert is ahead of grouped", text, max(few) < 1))
    if many:
        text = f"grouped over per expert: {_listed(many)}"
        found.append(Statement("beyond 32 experts: grouped is ahead of per expert", text, min(many) > 1))
    for it in settings:
        if it.point.num_experts == 256:
            ours = it.speed_up(GROUPED, clock=CLOCK), it.speed_up(GROUPED, has_decoder=True, clock=CLOCK)
            found.append(
                Statement(
                    "256 experts, grouped: 2.94 (encoder), 1.26 (encoder-decoder)",
                    f"{ours[0]:.2f}, {ours[1]:.2f}",
                    ours[0] >= 2.94 * NEAR and ours[1] >= 1.26 * NEAR,
                )
            )
    return found


def _batches(settings: Sequence[Setting]) -> list[Statement]:
    found = [it.speed_up(GROUPED, clock=CLOCK) for it in sorted(settings, key=lambda it: it.point.num_sequences)]
    if len(found) < 2:
        return []
    return [
        Statement("the speed-up grows with the batch", _listed(found), found == sorted(found)),
        Statement("small batches: the baseline is ahead", _listed(found), found[0] < 1),
    ]


def _skews(settings: Sequence[Setting]) -> list[Statement]:
    found = [it.speed_up(GROUPED, clock=CLOCK) for it in settings]
    if len(found) < 2:
        return []
    text = f"{_listed(found)}; largest over smallest {max(found) / min(found):.2f}"
    return [Statement("the speed-up hardly depends on the skew", text, max(found) / min(found) < ALIKE)]


def _hot_experts(settings: Sequence[Setting]) -> list[Statement]:
    stated = "the speed-up hardly depends on the number of hot experts"
    return [Statement(stated, it.ours, it.holds) for it in _skews(settings)]


def _sections(settings: Sequence[Setting]) -> list[Statement]:
    shares = []
    for is_encoder in (True, False):
        sections = settings[-1].sections(PER_EXPERT, is_encoder=is_encoder, layer=0).values()
        shares.append(sum(deviation for _, deviation in sections) / sum(mean for mean, _ in sections))
    text = f"{shares[0]:.0%} of an encoder's layer, {shares[1]:.0%} of a decoder's"
    return [Statement("ranks deviate more in decoder layers", text, shares[1] > shares[0])]


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)


STATEMENTS: Final[dict[str, Callable[[Sequence[Setting]], list[Statement]]]] = {
    "6.1": _latencies,
    "6.2": _numbers_of_experts,
    "6.3": _batches,
    "6.4": _skews,
    "6.5": _hot_experts,
    "6.6": _sections,
}
