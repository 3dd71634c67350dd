"""Which scores attention makes, and what becomes of them before they are weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from moeflow.kernels.arrays import Array


@dataclass(frozen=True, slots=True)
class Scores:
    """A family sets fields; without any it is plain attention.

    A score is query times key times `scale`, then capped, then `bias` is added. Weights are the softmax of scores; the
    head's sink is an additional score, of a zero value. Neither a window nor trees go with a bias.
    """

    sliding_window: int | None = None  # tokens a query sees, itself included; None: all before it
    scale: float | None = None  # None: D^-0.5
    soft_cap: float | None = None  # c: scores become c tanh(score / c); None: they stay
    sinks: Array | None = None  # [Q] float32 (gpt-oss)
    # [Q, 2R + 1] float32: by how far the key lies behind the query, from -R to R; what is further away counts as R (T5)
    bias: Array | None = None


PLAIN: Final = Scores()
