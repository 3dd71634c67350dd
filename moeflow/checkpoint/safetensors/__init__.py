"""Hugging Face folders: safetensors, one or sharded."""
