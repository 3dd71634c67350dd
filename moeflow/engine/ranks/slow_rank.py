"""Which rank the others wait for: all compute the same passes, so a slow one shows in how little it waits itself.

A pass takes every rank the same time, of which it waits for others in collectives. Where one hardly waits, and each of
the others does for half of its time and more, that one needs over twice as long for its part: its processor is shared,
throttled or weaker. Uneven parts make differences as well, but not for long, or not as large: experts move.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

SLOW_SHARE: Final = 0.5  # of passes that each of the others waits more than the slow one


def slow_rank(waited_shares: Sequence[float]) -> int | None:
    """Return the rank that all others wait for; None: there is none. `waited_shares` are of the passes' time, by rank.

    What a rank shares its processor with may slow down several: then nobody is named.
    """
    first, second = sorted(range(len(waited_shares)), key=waited_shares.__getitem__)[:2]
    return first if waited_shares[second] - waited_shares[first] > SLOW_SHARE else None
