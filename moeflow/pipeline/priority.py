"""The order of a queue of work: smaller numbers go first. All numbers below PREFETCH have a waiting caller."""

from __future__ import annotations

DEMAND = 0  # a caller waits for it
PREFETCH = 1  # a caller may need it; larger numbers: later
