"""Emulated devices as people write them."""

from __future__ import annotations

import pytest

from moeflow.core.errors import ConfigError
from moeflow.core.offload_config import EmulatedSpeeds, parse_emulated_device, t4_like


def test_memory_and_link_are_read():
    device = parse_emulated_device("emulated:1GiB, 0.5")
    assert device.capacity_bytes == 2**30
    assert device.speeds == EmulatedSpeeds(link=0.5e9)


def test_a_t4_keeps_its_ratios():
    speeds = parse_emulated_device("emulated:1GiB,0.12,t4").speeds
    assert speeds == t4_like(0.12e9)
    assert speeds.device_bytes == pytest.approx(3e9)
    assert speeds.device_flops / speeds.host_flops == pytest.approx(65 / 1.6)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("emulated", "is no emulated device"),
        ("emulated:1GiB", "is no emulated device"),
        ("cuda:1GiB,2", "is no emulated device"),
        ("emulated:much,2", "'much' is not a size"),
        ("emulated:1GiB,fast", "could not convert"),
        ("emulated:1GiB,0", "link of 0 GB/s"),
        ("emulated:1GiB,nan", "link of nan GB/s"),
        ("emulated:1GiB,2,h100", "only t4 is known"),
    ],
)
def test_what_cannot_be_read_is_explained(text, complaint):
    with pytest.raises(ConfigError, match=complaint):
        parse_emulated_device(text)
