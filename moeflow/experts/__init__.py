"""Experts of which only some are in memory: slots, the cache that assigns them, reads from disk, guesses."""
