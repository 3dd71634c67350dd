"""Where tensors live: storage of keys and values."""
