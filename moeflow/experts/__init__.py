"""Experts that are partly in memory: slots, the cache that assigns them, reads from disk, prediction and prefetch."""
