"""Layers that keep a state of each sequence in the place of keys and values."""
