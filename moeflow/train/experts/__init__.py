"""Experts of a dense model that learn from different texts, then together (branch-train-mix)."""
