"""Experts of a model that is larger than its GPU: some in slots there, all others computed by the CPU."""
