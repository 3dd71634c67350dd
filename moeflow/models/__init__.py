"""One file per model family, named as its Hugging Face `model_type`; the registry; loading."""
