"""The CPU extension behind functions on tensors: packed weights, whole layers, attention, rows."""
