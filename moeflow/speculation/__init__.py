"""Guessing the next tokens of requests: who guesses, what becomes of it, and how much of it is worth computing."""
