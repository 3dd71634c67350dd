"""A device across a link, measured: here the processor, since there is no GPU."""

from __future__ import annotations

import itertools

import pytest
import torch

from moeflow.core.hardware import DEVICE, RAM
from moeflow.core.units import KIB, MIB
from moeflow.planner.hardware import calibrate_device
from moeflow.planner.hardware.calibrate_device import measure_device

CPU = torch.device("cpu")


@pytest.fixture
def two_seconds(monkeypatch):
    """Whatever is measured takes two seconds by the clock."""
    monkeypatch.setattr(calibrate_device.time, "perf_counter", itertools.count(0, 2).__next__)


def test_a_device_and_both_ways_are_measured(two_seconds):
    level, there, back = measure_device(CPU, 2**30, buffer_bytes=5 * MIB, matrix_size=64)
    assert (level.name, level.capacity_bytes) == (DEVICE, 2**30)
    assert level.read_bytes_per_s == 5 * MIB / 2
    assert level.processor.peak_flops_per_s == tuple((dtype, 64**3) for dtype in ("float32", "float16", "bfloat16"))
    assert (there.source, there.target, back.source, back.target) == (RAM, DEVICE, DEVICE, RAM)
    for link in (there, back):
        assert [rate.transfer_bytes for rate in link.rates] == [256 * KIB, 4 * MIB]
        assert [rate.bytes_per_s for rate in link.rates] == [256 * KIB / 2, 4 * MIB / 2]


def test_a_small_buffer_is_copied_whole():
    _, there, _ = measure_device(CPU, 2**30, buffer_bytes=64 * KIB, matrix_size=16)
    assert [rate.transfer_bytes for rate in there.rates] == [64 * KIB]


def test_what_is_launched_is_waited_for(monkeypatch):
    log = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append("wait"))
    ticks = iter(range(100))
    monkeypatch.setattr(calibrate_device.time, "perf_counter", lambda: log.append("look") or next(ticks))
    assert calibrate_device._best(torch.device("cuda:0"), lambda: log.append("launch")) == 1
    assert log == ["wait", "look", "launch", "wait", "look"] * 6


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
def test_a_gpu_is_faster_than_its_link():
    level, there, back = measure_device(torch.device("cuda:0"), 2**30)
    assert level.read_bytes_per_s > max(there.peak_bytes_per_s, back.peak_bytes_per_s) > 1e9
