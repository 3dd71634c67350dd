"""The table of a pass's rotary positions by the CPU extension."""

from __future__ import annotations

from typing import Any

from moeflow.kernels.arrays import Array, address, floats_like, is_contiguous, is_float32, is_in_main_memory
from moeflow.kernels.cpu import extension

if extension.is_available():
    import moeflow.kernels._cpu as _cpu

_AVAILABLE = extension.is_available()


def accepts(positions: Array, frequencies: Array) -> bool:
    """Return whether the extension can make the table of these."""
    return _AVAILABLE and all(is_in_main_memory(it) and is_contiguous(it) for it in (positions, frequencies))


def bind_rotary(frequencies: Array, scale: float) -> Any:
    """Return a handle for the extension, which looks at the memory of the frequencies: [R/2] float32.

    Raises: ValueError if they are something else.
    """
    if not is_float32(frequencies) or frequencies.ndim != 1 or not is_contiguous(frequencies):
        raise ValueError(f"frequencies are a row of float32, not {frequencies.dtype} {list(frequencies.shape)}")
    return _cpu.Rotary(frequencies=address(frequencies), num_pairs=frequencies.shape[0], scale=scale)


def rotary_table(positions: Array, frequencies: Array, scale: float) -> tuple[Array, Array]:
    """Return cos and sin, see `kernels.rotary.rotary_table`.

    Shapes: positions [T] int64, frequencies [R/2] float32 -> [T, 1, R] float32.
    """
    shape = (positions.shape[0], 1, 2 * frequencies.shape[0])
    cos, sin = (floats_like(positions, *shape) for _ in range(2))
    _cpu.rotary_table(
        rotary=bind_rotary(frequencies, scale),
        positions=address(positions),
        num_tokens=shape[0],
        cos=address(cos),
        sin=address(sin),
    )
    return cos, sin
