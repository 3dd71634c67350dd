"""Packed weights as memory: mapped, so that a model computes from the page cache and nothing is copied.

The file is loaded into the cache and this process's page tables before anything computes, so that a failing disk is an
error here. After that, truncating the file would end the process by a signal. `moeflow pack` never changes its files in
place.
"""

from __future__ import annotations

import errno
import mmap
import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import Final

import numpy as np

from moeflow.checkpoint.packed.large_pages import LargePages
from moeflow.checkpoint.packed.layout import PACK_AGAIN, SlabIndex, SlabSpec
from moeflow.checkpoint.packed.reader import OnBytes, ignore
from moeflow.checkpoint.packed.weight_memory import LaidOutMemory
from moeflow.core.errors import CapacityError, CheckpointError
from moeflow.core.units import MIB, format_bytes
from moeflow.kernels.arrays import Array, array_on
from moeflow.kernels.lazy_memory import advise_huge_pages
from moeflow.kernels.mapped_pages import MappedPages

_POPULATE_READ: Final = 22  # MADV_POPULATE_READ, which Python does not name: Linux 5.14 and later
_KNOWS_PAGES: Final = sys.platform == "linux"  # how they lie, and how they become large
_STEP_BYTES: Final = 128 * MIB  # between two reports, and two chances for Ctrl-C


def map_weights(
    index: SlabIndex,
    on_bytes: OnBytes | None = None,
    *,
    left_on_disk: range = range(0),
    as_tensors: bool = True,
) -> LaidOutMemory:
    """Return a model's weights as they lie in its file, as torch's tensors or NumPy's arrays.

    The bytes `left_on_disk`, after all experts, are not loaded. Their pages are loaded on first use.

    Raises: CheckpointError if the file is not what the index says any more, or cannot be read; CapacityError if the
    system refuses the addresses.
    """
    spec = index.spec
    content, identity = _map(index)
    ranges = _ranges_without(index.spec, left_on_disk)
    _bring_in(content, index, ranges, on_bytes or ignore)
    as_mapped = np.frombuffer(content, np.uint8)
    whole = array_on(as_mapped, "cpu" if as_tensors else None)
    pages = LargePages(index.path, identity, partial(MappedPages, as_mapped, ranges)) if _KNOWS_PAGES else None
    slabs = [_slabs(whole, spec, layer) for layer in range(spec.num_layers)]
    return LaidOutMemory(whole[spec.resident_start :], slabs or None, is_filled=True, pages=pages)


def _slabs(whole: Array, spec: SlabSpec, layer: int) -> Array:
    """Return those of a layer: [E, stride] uint8."""
    start, stride_bytes = spec.layer_starts[layer], spec.stride_bytes(layer)
    slabs: Array = whole[start : start + spec.num_experts * stride_bytes].reshape(spec.num_experts, stride_bytes)
    return slabs


def _map(index: SlabIndex) -> tuple[mmap.mmap, os.stat_result]:
    """Map the whole file, and return its identity. The mapping is private: writes, which do not normally occur, stay in
    this process."""
    try:
        descriptor = os.open(index.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        remedy = "Check that the file is there and that you may read it"
        raise CheckpointError(f"cannot be opened ({error.strerror})", file=index.path, remedy=remedy) from error
    try:
        identity = os.fstat(descriptor)
        size = identity.st_size
        if size != index.spec.file_bytes:  # a page past the end would end the process
            problem = f"is {size} bytes long instead of {index.spec.file_bytes}: it was cut"
            raise CheckpointError(problem, file=index.path, remedy=PACK_AGAIN)
        flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
        content = mmap.mmap(descriptor, size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except (OSError, OverflowError) as error:
        raise CapacityError(
            f"{index.path} cannot be mapped: {format_bytes(index.spec.file_bytes)} of addresses are refused ({error}). "
            "Raise the limit (ulimit -v), or delete the file: weights are then packed at the start"
        ) from error
    finally:
        os.close(descriptor)
    advise_huge_pages(content, 0, size)  # where the file system caches in large pages, they are mapped as such
    return content, identity


def _ranges_without(spec: SlabSpec, left_on_disk: range) -> list[range]:
    """Return the bytes of a file without some of them."""
    if not left_on_disk:
        return [range(spec.file_bytes)]
    return [part for part in (range(left_on_disk.start), range(left_on_disk.stop, spec.file_bytes)) if part]


def _bring_in(content: mmap.mmap, index: SlabIndex, ranges: Sequence[range], on_bytes: OnBytes) -> None:
    bytes_total, bytes_done = sum(map(len, ranges)), 0
    for part in ranges:
        for start in part[::_STEP_BYTES]:
            length = min(_STEP_BYTES, part.stop - start)
            try:
                content.madvise(_POPULATE_READ, start, length)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    problem, remedy = f"cannot be read ({error.strerror})", f"Check the disk. {PACK_AGAIN}"
                    raise CheckpointError(problem, file=index.path, remedy=remedy) from error
                content.madvise(mmap.MADV_WILLNEED)  # an older system: pages come in as they are touched
                return
            bytes_done += length
            on_bytes(bytes_done, bytes_total)
