"""Models larger than memory: ours and llama.cpp under the same limit, set from outside."""
