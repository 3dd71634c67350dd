"""Forms of weights: shapes alone, tensors, slabs, packed; and the homes of packed experts."""
