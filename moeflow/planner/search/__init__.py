"""Finds the best policy for a goal, and what bounds it."""
