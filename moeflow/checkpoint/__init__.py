"""Model files in and out: Hugging Face folders, GGUF files, upcycling. No remote code; pickles only as data."""
