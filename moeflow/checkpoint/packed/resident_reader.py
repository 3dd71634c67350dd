"""The weights outside of slabs, read from packed weights into memory of our own, past the page cache.

For models within a memory limit: the system may drop mapped pages when memory is short, and read them again in the
middle of a pass.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from moeflow.checkpoint.packed.file_io import PAGE_BYTES
from moeflow.checkpoint.packed.layout import SlabIndex
from moeflow.checkpoint.packed.reader import SlabReader
from moeflow.checkpoint.packed.weight_memory import LaidOutMemory
from moeflow.core.errors import CapacityError
from moeflow.core.units import format_bytes
from moeflow.kernels.lazy_memory import allocate_lazily

_READERS = 4  # reads at a time; more brought nothing


def read_resident(index: SlabIndex) -> LaidOutMemory:
    """Return the weights outside of slabs; experts are kept elsewhere.

    Raises: StorageError if they cannot be read or are damaged, CheckpointError if the file is gone, CapacityError.
    """
    spec = index.spec
    try:
        storage = allocate_lazily(spec.resident_bytes + PAGE_BYTES)
    except MemoryError as error:
        need = format_bytes(spec.resident_bytes)
        raise CapacityError(f"the weights outside of experts need {need}, which cannot be allocated") from error
    start = -storage.data_ptr() % PAGE_BYTES
    resident = storage[start : start + spec.resident_bytes]
    view = resident.numpy().data
    reader = SlabReader(index, view)

    def read(number: int) -> None:
        at = spec.offset(number) - spec.resident_start
        reader.read(number, view[at : at + spec.part_bytes(number)])

    try:
        with ThreadPoolExecutor(_READERS) as threads:
            for _ in threads.map(read, range(spec.num_slabs, spec.num_parts)):
                pass
    finally:
        reader.close()
    return LaidOutMemory(resident, is_filled=True)
