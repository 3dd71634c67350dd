"""Emulated devices as people write them."""

from __future__ import annotations

import pytest

from moeflow.core.errors import ConfigError
from moeflow.core.offload_config import EmulatedSpeeds, parse_cuda_device, parse_emulated_device, t4_like
from moeflow.planner.hardware.machine_files import load_machine


def test_memory_and_link_are_read():
    device = parse_emulated_device("emulated:1GiB, 0.5")
    assert device.capacity_bytes == 2**30
    assert device.speeds == EmulatedSpeeds(link=0.5e9)


def test_a_t4_keeps_its_ratios():
    speeds = parse_emulated_device("emulated:1GiB,0.12,t4").speeds
    assert speeds == t4_like(0.12e9)
    assert speeds.device_bytes == pytest.approx(3.2e9)


def test_an_emulated_device_may_compute_in_torch():
    device = parse_emulated_device("emulated:1GiB,0.12,torch,t4")
    assert device.computes_in_torch
    assert device.speeds == t4_like(0.12e9)
    assert not parse_emulated_device("emulated:1GiB,0.12").computes_in_torch


@pytest.mark.parametrize(
    ("text", "device"),
    [
        ("cuda", ("cuda:0", None)),
        ("cuda:1", ("cuda:1", None)),
        ("cuda:16GiB", ("cuda:0", 2**34)),
        ("cuda:2:1.5g", ("cuda:2", 3 * 2**29)),
    ],
)
def test_a_gpu_and_its_memory_are_read(text, device):
    assert parse_cuda_device(text) == device


@pytest.mark.parametrize("text", ["cuda:much", "cuda:1GiB:2", "cuda:0:1GiB:2", "cuda:", "cuda:-1", "cuda:1:0"])
def test_what_is_no_gpu_is_explained(text):
    with pytest.raises(ConfigError, match=r"cannot be read.*such as cuda:16GiB or cuda:1:16GiB"):
        parse_cuda_device(text)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("emulated", "does not say how much memory it has: write it as"),
        ("emulated:,2", "does not say how much memory it has: write it as"),
        ("emulated:1GiB", "does not say how fast its link is: write it as"),
        ("emulated:1GiB,", "does not say how fast its link is: write it as"),
        ("emulated:1GiB,,t4", "does not say how fast its link is: write it as"),
        ("cuda:1GiB,2", "is no emulated device"),
        ("emulated:much,2", "'much' is not a size"),
        ("emulated:1GiB,fast", "its link is 'fast', which is no number: write it as"),
        ("emulated:1GiB,0", "a link of 0 GB/s nothing ever arrives: give it a number above 0"),
        ("emulated:1GiB,-3", "a link of -3 GB/s nothing ever arrives"),
        ("emulated:1GiB,nan", "a link of nan GB/s nothing ever arrives"),
        ("emulated:1GiB,2,h100", "only t4 and torch are known"),
    ],
)
def test_what_cannot_be_read_is_explained(text, complaint):
    with pytest.raises(ConfigError, match=complaint):
        parse_emulated_device(text)


@pytest.mark.parametrize("name", ["t4", "paper-s1", "paper-s6", "paper-s9"])
def test_a_t4_is_the_same_wherever_it_is_described(name):
    speeds, machine = t4_like(12e9), load_machine(name)
    device = machine.level("device")
    assert speeds.device_bytes == device.read_bytes_per_s == 320e9
    assert speeds.device_flops == device.processor.peak("float16") == 65e12
    assert speeds.link == machine.link("ram", "device").peak_bytes_per_s
    assert speeds.device_flops / speeds.host_flops == pytest.approx(65 / 1.6)
