"""Experts that another process computes: its service, its clients, and what goes between them."""
