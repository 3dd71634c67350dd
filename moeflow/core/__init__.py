"""The nouns every other floor speaks in. Plain Python: nothing here imports torch."""
