"""Model files in and out: Hugging Face folders, GGUF files, upcycling. No pickle, no remote code."""
