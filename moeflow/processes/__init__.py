"""The engine in a process of its own, its client, and what outlives it."""
