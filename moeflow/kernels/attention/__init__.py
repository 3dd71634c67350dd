"""Attention over paged keys and values: its inputs and its computation."""
