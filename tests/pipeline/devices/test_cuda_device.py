"""The GPU's device without a GPU: which stream waits for what, and that a check which finds races finds them."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest
import torch

from moeflow.core.errors import CapacityError
from moeflow.core.units import MIB
from moeflow.pipeline.devices import staging
from moeflow.pipeline.devices.cuda_device import CudaDevice
from tests.pipeline.devices.fake_cuda import Race, WatchedDevice, Watching


def buffers(device):
    device.synchronize()
    there, pinned = device.allocate(1000, "weights"), device.allocate_pinned(1000)
    with device.ordered(0, []):
        device.upload(there, pinned)
    with device.ordered(1, [0]), device.computing(0, 0):
        there.sum()
    return there, pinned


def test_a_buffer_is_overwritten_only_after_the_computing_that_reads_it():
    device = WatchedDevice()
    there, pinned = buffers(device)
    with device.ordered(2, [1]):
        device.upload(there, pinned)
    there, pinned = buffers(device)
    complaint = r"up writes bytes 0 to 1000 .*nothing makes it wait until compute reads"
    with pytest.raises(Race, match=complaint), device.ordered(2, [0]):
        device.upload(there, pinned)


def test_halves_do_not_wait_for_each_other():
    device = WatchedDevice()
    other = device.allocate(1000, "other weights")
    there, pinned = buffers(device)
    with device.ordered(2, []):
        device.upload(other, pinned)
        with pytest.raises(Race, match="up writes bytes 900 to 910"):
            device.upload(there[900:910], pinned[:10])


def test_the_host_waits_for_copies_where_it_computes():
    device = WatchedDevice()
    there, pinned = buffers(device)
    with device.ordered(2, [0]), pytest.raises(Race, match=r"thread .* writes bytes 0 to 1000"):
        pinned.fill_(1)  # while an upload reads it
    with device.ordered(3, [0]), device.computing_on_host(0, 0):
        pinned.fill_(1)
    with device.ordered(4, [1]):
        copy = device.to_host(there)
        with device.computing_on_host(0, 0):
            copy.add_(1)
    with device.ordered(5, [1]):
        copy = device.to_host(there)
        with pytest.raises(Race, match=r"thread .* writes bytes"):
            copy.add_(1)


def test_a_task_without_launches_ends_with_its_inputs():
    device = WatchedDevice()
    there, pinned = buffers(device)
    with device.ordered(2, [1]):
        pass
    with device.ordered(3, [2]):
        device.upload(there, pinned)
    assert device.cuda.races == []


def test_of_several_inputs_on_a_stream_the_latest_counts():
    device = WatchedDevice()
    there, pinned = buffers(device)
    with device.ordered(2, []), device.computing(0, 0):
        pass
    with device.ordered(3, [2]), device.computing(0, 0):
        there.sum()
    with device.ordered(4, [3, 1, 2]):
        device.upload(there, pinned)
    assert device.cuda.races == []


def test_what_is_computed_is_not_read_before_it_is_there():
    device = WatchedDevice()
    device.synchronize()
    with device.ordered(0, []), device.computing(0, 0):
        made = torch.ones(10) * 2
    with device.ordered(1, []), pytest.raises(Race, match="down reads bytes 0 to 40"):
        device.to_host(made)
    with device.ordered(2, [0]):
        copy = device.to_host(made)
        with device.computing_on_host(0, 0):
            assert copy.tolist() == [2] * 10
    with device.ordered(3, [0]), pytest.raises(Race, match="the host touches memory of the device"):
        made.add_(1)


def test_a_copy_on_the_device_may_be_given_up_while_it_is_computed_with():
    device = WatchedDevice()
    for is_kept in (True, False):
        device.synchronize()
        with device.ordered(0, []):
            copy = device.to_device(torch.ones(10))
        with device.ordered(1, [0]), device.computing(0, 0):
            made = copy * 2
        with device.ordered(2, [1]):
            if is_kept:
                device.to_host(made)
            del copy
        assert device.cuda.races == []


def test_streams_wait_for_events_and_threads_where_they_compute():
    device = WatchedDevice()
    there, pinned = buffers(device)
    device.cuda.log.clear()
    ((_, computed),) = device._ends[1].values()
    with device.ordered(2, [0, 1]):
        device.upload(there, pinned)
    with device.ordered(3, [2]), device.computing_on_host(0, 0):
        pinned.fill_(1)
    (first, second, third) = device.cuda.log
    assert first == ("up", "waits for", computed.name)
    assert second[:2] == ("up", "records")
    assert third == ("a thread", "waits for", second[2])
    assert {"up", "down", "compute"} == {stream.name for stream in (device._up, device._down, device._compute)}


def test_bytes_are_given_back_when_the_device_has_none(monkeypatch):
    device = WatchedDevice(capacity_bytes=1000)
    device.allocate(300, "weights")

    def refuse(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", refuse)
        with pytest.raises(CapacityError, match="experts need 500 B, but cpu has less"):
            device.allocate(500, "experts")
    assert device.memory.free_bytes == 700
    device.allocate(700, "experts")
    with pytest.raises(CapacityError, match=r"in use: weights 300 B, experts 700 B"):
        device.allocate(1, "more")


def test_work_that_finds_no_room_has_no_end():
    device = WatchedDevice(capacity_bytes=1000)
    with pytest.raises(torch.OutOfMemoryError), device.ordered(0, []), device.computing(0, 0):
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert not any(device._ends.values())


@pytest.mark.slow
def test_importing_the_device_asks_nothing_of_cuda():
    code = (
        "import torch\n"
        "def refuse(*a, **k): raise SystemExit('torch.cuda was called')\n"
        "for name in ('Stream', 'Event', 'is_available', 'synchronize', '_lazy_init', 'init', 'current_device'):\n"
        "    setattr(torch.cuda, name, refuse)\n"
        "import moeflow.engine.offload.offloaded_model, moeflow.pipeline.devices.cuda_device\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_between_passes_the_host_waits_for_everything():
    device = WatchedDevice()
    buffers(device)
    waits = ("a thread", "waits for", "everything")
    before = device.cuda.log.count(waits)
    device.synchronize()
    assert device.cuda.log.count(waits) == before + 1


def test_page_locked_memory_takes_no_more_than_is_asked_for():
    device = WatchedDevice()
    memory = CudaDevice.allocate_pinned(device, 5 * MIB + 1)  # which nothing watches, and so keeps
    assert device.cuda.pinned == {memory.data_ptr(): 5 * MIB + 1}
    assert not memory.any()
    part = memory.view(-1)[1:]
    del memory
    assert device.cuda.pinned
    del part
    assert device.cuda.pinned == {}
    assert device.allocate_pinned(0).nbytes == 0


def test_memory_is_page_locked_where_it_lies_or_not_at_all():
    device, parts = WatchedDevice(), [torch.zeros(size, dtype=torch.uint8) for size in (100, 50, 70)]
    device.cuda.most_pinned = 2
    assert not device.pin(parts)
    assert device.cuda.pinned == {}
    device.cuda.most_pinned = 3
    assert device.pin(parts)
    assert device.cuda.pinned == {part.data_ptr(): part.nbytes for part in parts}
    pinned = device.cuda.pinned
    del device
    gc.collect()
    assert pinned == {}


@pytest.mark.parametrize(
    ("refusal", "error", "words"),
    [
        ("out of memory (2)", CapacityError, "5.0 MiB of main memory cannot be page-locked: free main memory"),
        ("operation not supported (801)", RuntimeError, "not supported"),
    ],
)
def test_only_a_lack_of_memory_is_called_one(refusal, error, words):
    device = WatchedDevice()
    device.cuda.refusal = refusal
    with pytest.raises(error, match=words):
        device.allocate_pinned(5 * MIB)


@pytest.mark.parametrize("size", [0, 1, 100, 101, 200, 201, 999])
def test_bytes_that_stay_are_copied_through_page_locked_buffers(monkeypatch, size):
    monkeypatch.setattr(staging, "BUFFER_BYTES", 100)
    device = WatchedDevice()
    source = torch.arange(3 * size, dtype=torch.int64).to(torch.uint8).view(3, size)
    with Watching(device.cuda):
        held = device.hold(source, "experts")
    assert held.data_ptr() != source.data_ptr() or not size
    assert torch.equal(held, source)
    assert device.memory.used_bytes == 3 * size
    assert device.cuda.races == []
