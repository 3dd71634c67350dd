"""What would be: the real bookkeeping on a virtual clock."""
