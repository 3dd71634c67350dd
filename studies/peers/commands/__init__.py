"""The commands of `run.py`, a module for each kind of measurement."""
