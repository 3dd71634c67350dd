"""Model files in and out: Hugging Face folders, GGUF files, upcycling. No remote code, nor pickles but fairseq's."""
