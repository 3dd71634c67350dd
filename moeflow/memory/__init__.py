"""Where tensors live: storage of keys and values, slabs of experts on disk, slots for them, and who is in which."""
