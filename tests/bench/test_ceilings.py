"""The machine's own speed: that it is measured, and that torch's threads are left as they were."""

from __future__ import annotations

import itertools
import mmap

import pytest
import torch

from moeflow.bench.ceilings import Ceilings
from moeflow.bench.memory import peak_bytes, reset_peak, resident_bytes
from moeflow.kernels import ceilings
from moeflow.kernels.ceilings import measure_flops, measure_read, torch_threads


@pytest.fixture
def half_seconds(monkeypatch):
    """A clock that advances by half a second at each read."""
    looks = itertools.count()
    monkeypatch.setattr(ceilings.time, "perf_counter", lambda: 0.5 * next(looks))


@pytest.mark.parametrize("num_threads", [1, 2, 4])
def test_reading_is_measured(half_seconds, num_threads):
    assert measure_read(num_threads, buffer_bytes=2**20) == 2 * 2**20


def test_a_byte_that_is_there_would_be_found():
    buffer = torch.ones(2**16, dtype=torch.uint8)
    buffer[-1] = 0
    with pytest.raises(AssertionError, match="whole buffer must be read"):
        measure_read(2, buffer=buffer)


def test_computing_is_measured_and_threads_stay(half_seconds):
    before = torch.get_num_threads()
    assert measure_flops(2, size=64) == 2 * 2 * 64**3
    assert torch.get_num_threads() == before


def test_threads_come_back_after_an_error():
    before = torch.get_num_threads()

    def fail() -> None:
        with torch_threads(before + 1):
            assert torch.get_num_threads() == before + 1
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        fail()
    assert torch.get_num_threads() == before


def test_ceilings_are_medians():
    ceilings = Ceilings(1, [1.0, 5.0, 3.0], [2.0, 4.0, 9.0])
    assert (ceilings.read, ceilings.flops) == (3.0, 4.0)


def test_the_peak_starts_over():
    """Memory comes from the system and goes back at once, whatever the allocator has kept of earlier tests."""
    with mmap.mmap(-1, 64 * 2**20) as block:
        block.write(bytes(len(block)))
        held = resident_bytes()
    reset_peak()
    peak = peak_bytes()
    if peak is not None:  # Linux
        assert peak < held
        with mmap.mmap(-1, 64 * 2**20) as block:
            block.write(bytes(len(block)))
        assert (peak_bytes() or 0) >= peak + 48 * 2**20
