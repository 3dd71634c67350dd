"""Devices for offloading: every kind that this machine has keeps its cap and gives bytes back as they were."""

from __future__ import annotations

import pytest
import torch

from moeflow.core.errors import CapacityError
from moeflow.core.offload_config import CudaDeviceConfig, EmulatedDeviceConfig, EmulatedSpeeds
from moeflow.pipeline.devices.cuda_device import CudaDevice
from moeflow.pipeline.devices.emulated_device import EmulatedDevice
from moeflow.pipeline.devices.offload_device import OffloadDevice

CAPACITY = 2**20


def emulated(**speeds) -> EmulatedDevice:
    return EmulatedDevice(EmulatedDeviceConfig(capacity_bytes=CAPACITY, speeds=EmulatedSpeeds(**speeds)))


@pytest.fixture(
    params=[
        "emulated",
        pytest.param(
            "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
        ),
    ]
)
def device(request) -> OffloadDevice:
    if request.param == "emulated":
        return emulated()
    return CudaDevice(CudaDeviceConfig(name="cuda:0", memory_bytes=CAPACITY, capacity_bytes=CAPACITY))


def test_the_cap_is_kept_and_the_error_says_by_whom_memory_is_taken(device):
    device.allocate(CAPACITY // 2, "weights")
    device.memory.take(CAPACITY // 4, "activations")
    with pytest.raises(CapacityError, match=r"need 512.0 KiB on .* 256.0 KiB of 1.0 MiB left .*weights 512.0 KiB"):
        device.allocate(CAPACITY // 2, "keys and values")
    assert device.memory.free_bytes == CAPACITY // 4
    device.allocate(CAPACITY // 4, "the rest")
    assert device.memory.free_bytes == 0


def test_bytes_come_back_as_they_went(device):
    pinned, back = device.allocate_pinned(5000), device.allocate_pinned(5000)
    pinned.copy_(torch.arange(5000) % 251)
    there = device.allocate(5000, "bytes")
    device.upload(there, pinned)
    with device.computing(5000, 0):
        there.add_(1)
        changed = there.view(50, 100)[:, :60].clone()
    device.synchronize()
    device.download(back, there)
    assert torch.equal(back, pinned + 1)
    assert torch.equal(device.to_host(changed[:, 7:]), back.view(50, 100)[:, 7:60])
    assert torch.equal(device.to_host(device.to_device(back)), back)
    assert torch.equal(device.to_host(device.hold(pinned, "more")), pinned)
    with device.computing_on_host(5000, 0):
        back.zero_()


def test_links_and_processors_are_charged_for_their_time():
    device = emulated(link=1e7, device_bytes=1e7, host_flops=1e7)
    memory = device.allocate(100_000, "bytes")
    device.upload(memory, memory.clone())
    device.download(memory.clone(), memory)
    with device.computing(100_000, 5):
        pass
    with device.computing_on_host(10**9, 100_000):
        pass
    late_s, charged_s = device.late_and_charged_s
    assert charged_s == pytest.approx(0.04)
    assert late_s >= 0
