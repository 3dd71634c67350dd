"""Measures a torch device and its link: bytes and operations a second, launches, and the speed of copies by size.

A processor can be measured likewise, as if it lay across a link.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from moeflow.core.hardware import DEVICE, RAM, Link, LinkRate, MemoryLevel, Processor
from moeflow.core.units import KIB, MIB

BUFFER_BYTES: Final = 512 * MIB  # more than a GPU's cache
MATRIX_SIZE: Final = 4096
COPY_BYTES: Final = (256 * KIB, 4 * MIB, 64 * MIB)
LAUNCHES: Final = 100
TRIES: Final = 5  # the best counts: whatever disturbs one only slows it down
_DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)


def measure_device(
    device: torch.device, capacity_bytes: int, *, buffer_bytes: int = BUFFER_BYTES, matrix_size: int = MATRIX_SIZE
) -> tuple[MemoryLevel, Link, Link]:
    """Return the device, the link to it and the link back.

    Blocks: for about a second on a GPU. Raises: RuntimeError from torch if the buffers do not fit on the device.
    """
    buffer = torch.ones(buffer_bytes, dtype=torch.uint8, device=device)
    values = buffer.view(torch.int32)
    read_s = _best(device, lambda: values.max())
    processor = Processor(
        name=torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        peak_flops_per_s=tuple(
            (str(dtype).removeprefix("torch."), _flops(device, dtype, matrix_size)) for dtype in _DTYPES
        ),
        launch_s=_launch_s(device),
        seam_s=_seam_s(device),
    )
    level = MemoryLevel(
        name=DEVICE, capacity_bytes=capacity_bytes, read_bytes_per_s=buffer_bytes / read_s, processor=processor
    )
    sizes = [size for size in COPY_BYTES if size <= buffer_bytes] or [buffer_bytes]
    pinned = torch.ones(max(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = [_rate(device, buffer[:size], pinned[:size]) for size in sizes]
    back = [_rate(device, pinned[:size], buffer[:size]) for size in sizes]
    return (
        level,
        Link(source=RAM, target=DEVICE, rates=tuple(there)),
        Link(source=DEVICE, target=RAM, rates=tuple(back)),
    )


def _flops(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """Return FLOP/s of a product of two square matrices."""
    left, right = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    return 2.0 * size**3 / _best(device, lambda: left @ right)


def _launch_s(device: torch.device) -> float:
    """Return the seconds from one small kernel to the next."""
    value = torch.ones(1, device=device)

    def launch() -> None:
        for _ in range(LAUNCHES):
            value.add_(1)

    return _best(device, launch) / LAUNCHES


def _seam_s(device: torch.device) -> float:
    """Return the seconds of a value to the host, which waits for it, and back."""
    value = torch.ones(1, device=device)
    on_host = torch.ones(1, pin_memory=device.type == "cuda")

    def there_and_back() -> None:
        on_host.copy_(value, non_blocking=True)
        _wait(device)
        value.copy_(on_host, non_blocking=True)

    return _best(device, there_and_back)


def _rate(device: torch.device, target: Tensor, source: Tensor) -> LinkRate:
    seconds = _best(device, lambda: target.copy_(source, non_blocking=True))
    return LinkRate(transfer_bytes=source.nbytes, bytes_per_s=source.nbytes / seconds)


def _best(device: torch.device, run: Callable[[], object]) -> float:
    """Return the seconds of a call until its launched work is done; the first one, which warms up, does not count."""
    times = []
    for _ in range(TRIES + 1):
        _wait(device)
        start = time.perf_counter()
        run()
        _wait(device)
        times.append(time.perf_counter() - start)
    return min(times[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
