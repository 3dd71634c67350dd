"""Several HTTP processes before the same engines."""
