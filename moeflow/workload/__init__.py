"""Synthetic requests for measurements."""
