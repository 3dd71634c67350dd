"""What was read ahead is counted once: as used when a pass needs it, as wasted when it goes before that."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moeflow.experts.cache.cache_stats import CacheStats
from moeflow.experts.cache.prefetches import Prefetches

SLAB_BYTES = 10


@given(st.lists(st.tuples(st.sampled_from(["arrive", "use", "use many", "evict"]), st.integers(0, 3))))
def test_every_byte_is_used_or_wasted_or_still_open(events):
    stats = CacheStats()
    prefetches = Prefetches(4, SLAB_BYTES, stats)
    state = dict.fromkeys(range(4), "absent")
    counts = {"arrived": 0, "used": 0, "wasted": 0}
    for event, number in events:
        if event == "arrive" and state[number] == "absent":
            prefetches.on_arrival(number)
            state[number] = "unused"
            counts["arrived"] += 1
        elif event == "use":
            prefetches.on_use(number)
            counts["used"] += state[number] == "unused"
            state[number] = "used" if state[number] == "unused" else state[number]
        elif event == "use many":
            prefetches.on_uses(np.arange(number))
            for one in range(number):
                counts["used"] += state[one] == "unused"
                state[one] = "used" if state[one] == "unused" else state[one]
        elif event == "evict" and state[number] != "absent":
            prefetches.awaited[number] = True
            prefetches.on_eviction(number)
            counts["wasted"] += state[number] == "unused"
            state[number] = "absent"
            assert not prefetches.awaited[number]
    found = (stats.prefetched_bytes, stats.used_bytes, stats.wasted_bytes)
    assert found == tuple(SLAB_BYTES * counts[name] for name in ("arrived", "used", "wasted"))
