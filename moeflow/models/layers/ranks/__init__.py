"""Layers of which each rank computes a part."""
