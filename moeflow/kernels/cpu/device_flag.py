"""A wait for a number in main memory that a GPU writes, without Python's lock."""

from __future__ import annotations

from contextlib import suppress

from moeflow.kernels.arrays import Array, address

with suppress(ImportError):  # without it nothing here works; `cpu.why_not` says why
    import moeflow.kernels._cpu as _cpu


def wait_for_flag(flag: Array, seconds: float) -> bool:
    """Spin until the flag, [1] int64, is not 0; at most so long. Return whether it is.

    All that the GPU wrote before the flag is then visible.
    """
    is_raised: bool = _cpu.wait_for_flag(address(flag), seconds)
    return is_raised
