"""Who and what may come in: host names, keys, body size, strict JSON, the bound of the queue."""
