"""Ollama's API: its requests as the other APIs' conversations and texts, its answers as lines of JSON."""
