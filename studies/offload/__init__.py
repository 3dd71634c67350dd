"""Models larger than memory: ours and peers under the same limit, set from outside."""
