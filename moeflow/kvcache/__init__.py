"""KV bookkeeping: which blocks hold whose keys and values. Block numbers only; the tensors live elsewhere."""
