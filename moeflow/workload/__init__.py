"""Requests that nobody asked for: made-up traffic to measure with."""
