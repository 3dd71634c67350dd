"""Modules that are run as processes."""
