"""What became of each of the last requests: where its time went, and why."""
