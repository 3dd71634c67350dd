"""The page of all results, written from their records."""
