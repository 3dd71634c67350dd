"""Only a lack of memory becomes a CapacityError, shown with real errors of torch."""

from __future__ import annotations

import pytest
import torch

from moeflow.core.errors import CapacityError
from moeflow.core.out_of_memory import out_of_memory_as


def too_many_bytes():
    torch.empty(2**50, dtype=torch.uint8)


def too_many_numbers():
    torch.empty(2**40, 2**40)


def raised(error):
    raise error


@pytest.mark.parametrize(
    "run",
    [
        too_many_bytes,
        too_many_numbers,
        lambda: raised(MemoryError()),
        lambda: raised(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")),
        lambda: raised(RuntimeError("CUDA error: out of memory")),
    ],
)
def test_what_lacks_memory_is_a_capacity_error(run):
    with pytest.raises(CapacityError, match=r"^the cache does not fit$"), out_of_memory_as("the cache does not fit"):
        run()


@pytest.mark.parametrize(
    "run",
    [
        lambda: torch.ones(2) @ torch.ones(3),
        lambda: raised(torch.AcceleratorError("CUDA error: no kernel image is available for execution on the device")),
    ],
)
def test_other_errors_stay_what_they_are(run):
    with pytest.raises(RuntimeError), out_of_memory_as("the cache does not fit"):
        run()
