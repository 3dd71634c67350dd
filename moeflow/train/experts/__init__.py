"""Experts of a dense model that learn from different texts, then jointly (branch-train-mix)."""
