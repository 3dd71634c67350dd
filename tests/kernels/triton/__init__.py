"""Tests of the Triton kernels: by Triton's interpreter, and by compiling ahead of time."""
