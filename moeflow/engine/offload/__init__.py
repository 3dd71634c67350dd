"""Runs a model that is larger than its device: its passes go through a pipeline."""
