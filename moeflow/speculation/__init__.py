"""Drafting the next tokens of requests: who drafts, what becomes of it, and how much of it is worth computing."""
