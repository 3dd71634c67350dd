"""Durations of work on an emulated device, and a probe's speed of reading a file: by a clock of the test."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace

import pytest
import torch

from moeflow.core.offload_config import EmulatedDeviceConfig, EmulatedSpeeds
from moeflow.experts import disk_reader
from moeflow.pipeline.devices.emulated_device import EmulatedDevice

SPEEDS = EmulatedSpeeds(link=1e8, device_bytes=2e8, device_flops=5e8, host_bytes=1e7, host_flops=4e7)


@pytest.fixture
def device():
    return EmulatedDevice(EmulatedDeviceConfig(capacity_bytes=10**6, speeds=SPEEDS))


def charged(device, work):
    before = device.late_and_charged_s[1]
    work()
    return device.late_and_charged_s[1] - before


def within(block):
    with block:
        pass


@pytest.mark.parametrize(
    ("num_bytes", "flops", "on_device", "on_host"),
    [(20_000, 1, 1e-4, 2e-3), (1, 50_000, 1e-4, 1.25e-3), (40_000, 50_000, 2e-4, 4e-3), (0, 0, 0.0, 0.0)],
)
def test_work_lasts_as_long_as_its_slower_part(device, num_bytes, flops, on_device, on_host):
    assert charged(device, lambda: within(device.computing(num_bytes, flops))) == pytest.approx(on_device)
    assert charged(device, lambda: within(device.computing_on_host(num_bytes, flops))) == pytest.approx(on_host)


def test_copies_take_the_link(device):
    here, there = torch.arange(25_000, dtype=torch.int32), torch.zeros(25_000, dtype=torch.int32)
    assert charged(device, lambda: device.upload(there, here)) == pytest.approx(1e-3)  # 100 kB
    assert torch.equal(there, here)
    back = torch.zeros_like(here)
    assert charged(device, lambda: device.download(back, there)) == pytest.approx(1e-3)
    assert torch.equal(back, here)
    assert charged(device, lambda: device.to_device(here)) == pytest.approx(1e-3)
    assert charged(device, lambda: device.to_host(here)) == pytest.approx(1e-3)
    assert torch.equal(device.to_device(here), here)
    assert torch.equal(device.to_host(here), here)


def test_what_the_machine_does_as_fast_as_it_can_costs_nothing():
    free = EmulatedDevice(EmulatedDeviceConfig(capacity_bytes=10, speeds=EmulatedSpeeds()))
    assert charged(free, lambda: within(free.computing(10**12, 10**12))) == 0
    assert charged(free, lambda: within(free.computing_on_host(10**12, 10**12))) == 0


def test_memory_is_taken_once_and_held_where_it_lies(device):
    block = device.allocate(600, "weights")
    assert (block.nbytes, block.dtype, int(block.sum())) == (600, torch.uint8, 0)
    assert device.memory.free_bytes == 10**6 - 600
    source = torch.ones(300, dtype=torch.uint8)
    assert device.hold(source, "more") is source
    assert device.memory.used_bytes == 900
    device.memory.give_back(300, "more")
    assert device.memory.used_bytes == 600
    assert device.allocate_pinned(50).nbytes == 50
    assert device.memory.used_bytes == 600  # pinned memory is the host's


class Reads:
    """A file of packed weights whose reads take a tenth of a second each; some reads fail."""

    def __init__(self, monkeypatch, bad=()):
        self.index = SimpleNamespace(spec=SimpleNamespace(slab_bytes=1000, num_slabs=7, part_bytes=lambda _: 1000))
        self.now, self.numbers, self.slots, self.bad = 0.0, [], set(), bad
        monkeypatch.setattr(disk_reader, "perf_counter", lambda: self.now)
        monkeypatch.setattr(disk_reader, "_PROBE_BYTES", 20_000)

    def fill(self, number, into):
        self.slots.add(into)
        self.now += 0.1
        self.numbers.append(number)
        if number in self.bad:
            raise OSError


ARENA = SimpleNamespace(view=lambda slot: f"slot {slot}")


def test_a_probe_reads_until_its_time_is_over(monkeypatch):
    reads = Reads(monkeypatch)
    monkeypatch.setattr(disk_reader, "_PROBE_S", 0.45)
    rate = disk_reader._read_rate(reads, ARENA, 1, random.Random(0), 3)
    assert len(reads.numbers) == 5
    assert rate == pytest.approx(5 * 1000 / 0.5)
    assert reads.slots == {"slot 0"}


@pytest.mark.parametrize(("depth", "num_slots", "num_reads"), [(4, 9, 20), (30, 2, 30)])
def test_a_probe_reads_so_many_bytes_and_a_slab_for_each_thread_at_least(monkeypatch, depth, num_slots, num_reads):
    reads = Reads(monkeypatch)
    monkeypatch.setattr(disk_reader, "_PROBE_S", 1e9)
    rate = disk_reader._read_rate(reads, ARENA, depth, random.Random(0), num_slots)
    assert len(reads.numbers) == num_reads
    assert 4 < len(set(reads.numbers)) <= 7 > max(reads.numbers)
    assert rate == pytest.approx(1000 / 0.1)
    assert reads.slots <= {f"slot {slot}" for slot in range(min(depth, num_slots))}


def test_bad_slabs_do_not_count(monkeypatch):
    reads = Reads(monkeypatch, bad={0, 1, 2})
    monkeypatch.setattr(disk_reader, "_PROBE_S", 1e9)
    rate = disk_reader._read_rate(reads, ARENA, 1, random.Random(0), 1)
    good = sum(number > 2 for number in reads.numbers)
    assert 0 < good < len(reads.numbers) == 20
    assert rate == pytest.approx(good * 1000 / 2.0)


def test_depths_are_tried_in_turn_and_their_rates_added(monkeypatch):
    tried = []
    rates = itertools.cycle([10.0, 10.4, 10.6])
    monkeypatch.setattr(disk_reader, "_read_rate", lambda reader, arena, depth, *_: tried.append(depth) or next(rates))
    assert disk_reader.probe_read_depth(None, None, 5) == 16
    assert tried == list(disk_reader.READ_DEPTHS) * 2
