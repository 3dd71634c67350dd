"""The settings of the sliced experts paper's experiments, at sizes for a small machine.

Published: 4 GPUs, Switch base, 250 sequences of 120 tokens, 100 iterations. Here: fewer ranks, layers and sequences.
Skews, shares of hot experts, numbers of experts and capacity factors are those of the paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from studies.parallel.case import Case, LayerShape
from studies.parallel.whole_model import ModelTask

SEQUENCE_TOKENS: Final = 120
MOST_CAPACITY: Final = 50.0  # the paper's factor is the number of experts, and this at most
EXPERTS: Final = 128  # of the figures that do not vary it
SKEW: Final = 0.6
SIZES: Final = {"switch-base": (768, 3072), "switch-small": (512, 2048), "tiny": (64, 64)}  # hidden, width
STEPS: Final = 2  # of the decoder
WHOLE_ENCODER: Final = "encoder"
FIGURES: Final = ("6.1", "6.2", "6.3", "6.4", "6.5", "6.6", WHOLE_ENCODER)


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """A setting of one experiment, or of several."""

    figures: tuple[str, ...]
    num_experts: int = EXPERTS
    num_sequences: int = 2  # of each rank
    router_skew: float = SKEW
    num_hot: int | None = None  # None: a tenth
    capacity_factor: float = MOST_CAPACITY
    router: Literal["skewed", "own"] = "skewed"

    @property
    def hot(self) -> int:
        """Experts that get the share of tokens."""
        return self.num_hot or max(self.num_experts // 10, 1)


def points_of(figures: tuple[str, ...], most_experts: int) -> list[Point]:
    """Return the settings of some figures with at most so many experts, by number of experts."""
    fixed = min(EXPERTS, most_experts)
    found = [
        *(
            Point(figures=("6.2", *(("6.3", "6.4", "6.6") if number == fixed else ())), num_experts=number)
            for number in (8, 16, 32, 64, 128, 256)
        ),
        Point(figures=("6.1",), num_experts=fixed, router="own"),
        *(Point(figures=("6.3",), num_experts=fixed, num_sequences=number) for number in (1, 4)),
        *(Point(figures=("6.4",), num_experts=fixed, router_skew=skew) for skew in (0.1, 0.3, 0.9)),
        *(
            Point(figures=("6.5",), num_experts=fixed, num_hot=number, capacity_factor=90.0)
            for number in sorted({1, max(fixed // 10, 1), fixed // 2})
        ),
        Point(figures=(WHOLE_ENCODER,), num_experts=8, num_sequences=4),
        Point(figures=(WHOLE_ENCODER,), num_experts=32),
    ]
    wanted = [it for it in found if set(it.figures) & set(figures) and it.num_experts <= most_experts]
    return sorted(wanted, key=lambda it: it.num_experts)


@dataclass(frozen=True, slots=True)
class Sizes:
    """What all settings have in common."""

    num_ranks: int
    hidden: int
    width: int
    num_layers: int

    def layer(self, num_experts: int) -> LayerShape:
        """Return the shape of a layer with experts."""
        return LayerShape(
            num_ranks=self.num_ranks,
            num_experts=num_experts,
            top_k=1,
            hidden=self.hidden,
            width=self.width,
            is_gated=False,
            weights="bfloat16",
        )

    def task(self, point: Point, layout: str, *, is_checked: bool) -> ModelTask:
        """Return a batch of a setting in a layout."""
        case = Case(
            layer=self.layer(point.num_experts),
            num_tokens=(point.num_sequences * SEQUENCE_TOKENS,) * self.num_ranks,
            router_skew=point.router_skew,
            num_experts_skew=point.hot,
            capacity_factor=min(point.capacity_factor, point.num_experts),
            seed=0,
        )
        return ModelTask(
            case,
            layout,
            num_layers=self.num_layers,
            sequence_tokens=SEQUENCE_TOKENS,
            num_steps=0 if WHOLE_ENCODER in point.figures else STEPS,
            router=point.router,
            is_checked=is_checked,
        )
