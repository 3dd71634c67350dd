"""Hugging Face folders whose weights are quantized: each matrix put together from the tensors that it was cut into."""
