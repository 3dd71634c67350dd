"""The shared part of all conversation APIs: the request to a model, and its parsed answer."""
