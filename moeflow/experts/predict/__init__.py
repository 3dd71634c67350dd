"""Which experts come next, and whether guessing pays."""
