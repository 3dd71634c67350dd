"""Attention over paged keys and values: what it is given, and what it computes."""
