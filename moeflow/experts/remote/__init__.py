"""Experts in another machine's memory: lent there, placed and used from here."""
