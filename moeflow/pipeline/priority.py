"""Who goes first in a queue of work. Smaller numbers do; all below PREFETCH are for somebody who waits."""

from __future__ import annotations

DEMAND = 0  # somebody waits for it
PREFETCH = 1  # somebody may need it; larger numbers: later
