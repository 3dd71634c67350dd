"""Hugging Face folders with quantized weights: each matrix is assembled from its tensors."""
