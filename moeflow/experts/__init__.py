"""Experts of which only some are in memory: slots, the cache that decides who has one, reads from disk, guesses."""
