"""Weights on disk in the layout that kernels read: written once, then mapped, or read into slots."""
