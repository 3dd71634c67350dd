"""GGUF files, seen as the Hugging Face checkpoints of the same models."""
