"""Triton kernels for NVIDIA GPUs. Each stands behind the same function as the CPU kernel and the torch reference."""
