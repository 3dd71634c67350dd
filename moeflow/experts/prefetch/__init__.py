"""Prefetches experts: sources rank the experts that a pass will probably need, and one driver starts the reads."""
