"""Machines: described in files, or this one, measured."""
