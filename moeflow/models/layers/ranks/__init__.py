"""Layers that ranks share; each computes a part."""
