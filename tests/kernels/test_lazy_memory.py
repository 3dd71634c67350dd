"""Memory that is only taken once it is used."""

import psutil
import pytest

from moeflow.kernels.lazy_memory import ALIGNMENT, allocate_lazily

MIB = 2**20


@pytest.mark.parametrize("num_bytes", [0, 1, 100, 2 * MIB, 5 * MIB + 1])
def test_it_is_zeroed_and_aligned(num_bytes):
    memory = allocate_lazily(num_bytes)
    assert memory.shape == (num_bytes,)
    assert num_bytes == 0 or memory.data_ptr() % ALIGNMENT == 0
    assert not memory.any()
    memory.fill_(1)
    assert memory.all()


def test_what_is_not_touched_takes_no_room():
    process = psutil.Process()
    before = process.memory_info().rss
    memory = allocate_lazily(2**31)
    memory[2**30] = 1
    assert process.memory_info().rss - before < 64 * MIB


@pytest.mark.parametrize("num_bytes", [2**50, 2**63])
def test_what_cannot_be_had_is_a_memory_error(num_bytes):
    with pytest.raises(MemoryError, match=f"{num_bytes} bytes"):
        allocate_lazily(num_bytes)
