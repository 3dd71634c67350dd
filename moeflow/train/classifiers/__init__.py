"""Trains Switch Transformers that sort texts into classes, and enlarges them to more experts."""
