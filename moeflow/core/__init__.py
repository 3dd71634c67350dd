"""Data types that all other folders use. Plain Python: nothing here imports torch."""
