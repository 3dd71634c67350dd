"""The wait for a flag that a GPU writes: ends with the flag, or in time, and leaves Python's lock to others."""

from __future__ import annotations

import threading

import torch

from moeflow.kernels.cpu.device_flag import DeviceFlag


def test_a_raised_flag_is_no_wait(needs_kernels: None) -> None:
    assert DeviceFlag(torch.ones(1, dtype=torch.int64)).wait(0.0)


def test_a_wait_ends_without_the_flag(needs_kernels: None) -> None:
    assert not DeviceFlag(torch.zeros(1, dtype=torch.int64)).wait(0.001)


def test_another_thread_of_python_raises_the_flag(needs_kernels: None) -> None:
    flag, began = torch.zeros(1, dtype=torch.int64), threading.Event()

    def raise_flag() -> None:
        began.wait()
        flag.fill_(-1)

    writer = threading.Thread(target=raise_flag)
    writer.start()
    began.set()
    found = DeviceFlag(flag)
    assert found.wait(60.0)
    writer.join()
    found.lower()
    assert not found.wait(0.0)
