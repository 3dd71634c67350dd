"""Which experts are resident: hits, loads, eviction. Plain Python, one lock."""
