"""Checkpoints whose files name or stack their tensors in ways of their own, seen with a name for each matrix."""
