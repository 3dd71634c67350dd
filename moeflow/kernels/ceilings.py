"""The machine's limits: bytes read per second, and float32 operations per second, of all threads.

Reading: each thread searches its part of a buffer, far larger than any cache, for an absent byte. libc's memchr is a
plain vectorized read and holds no lock. Computing: torch's product of
two square matrices of 2048 rows, which the BLAS beneath runs near the peak.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

from moeflow.kernels.on_demand import torch

if TYPE_CHECKING:
    from torch import Tensor


BUFFER_BYTES = 512 * 1024**2
MATRIX_SIZE = 2048  # 0.07 s at 245 GFLOP/s
TRIES = 3  # a sample is the best of so many, since whatever disturbs one only slows it down


def measure_read(num_threads: int, buffer_bytes: int = BUFFER_BYTES, buffer: Tensor | None = None) -> float:
    """Return bytes read a second by that many threads; from `buffer` uint8, which must hold no zero, if it is given."""
    memchr = ctypes.CDLL(None).memchr
    memchr.restype = ctypes.c_void_p
    memchr.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
    if buffer is None:
        buffer = torch.ones(buffer_bytes, dtype=torch.uint8)
    part = buffer.nbytes // num_threads
    address = buffer.data_ptr()

    def read(index: int) -> bool:
        return memchr(address + index * part, 0, part) is None

    best_s = float("inf")
    with ThreadPoolExecutor(num_threads) as threads:
        for _ in range(TRIES + 1):  # the first wakes the threads
            start = time.perf_counter()
            is_absent = all(threads.map(read, range(num_threads)))
            best_s = min(best_s, time.perf_counter() - start)
            assert is_absent, "the whole buffer must be read"
    return part * num_threads / best_s


def measure_flops(num_threads: int, size: int = MATRIX_SIZE) -> float:
    """Return float32 operations a second."""
    with torch_threads(num_threads), torch.inference_mode():
        a, b = torch.rand(size, size), torch.rand(size, size)
        out = a @ b  # warm-up
        best_s = float("inf")
        for _ in range(TRIES):
            start = time.perf_counter()
            torch.mm(a, b, out=out)
            best_s = min(best_s, time.perf_counter() - start)
    return 2.0 * size**3 / best_s


@contextmanager
def torch_threads(num_threads: int) -> Iterator[None]:
    """Let torch compute with that many threads for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
