"""A GPU is measured in a process of its own; here the processor, since there is no GPU."""

from __future__ import annotations

import pytest

from moeflow.core.errors import ConfigError
from moeflow.core.hardware import DEVICE, RAM
from moeflow.core.units import MIB
from moeflow.planner.hardware.gpu_figures import gpu_figures, with_gpu
from tests.planner.examples import machine

pytestmark = pytest.mark.slow  # starts processes


def test_a_device_is_added_to_a_machine():
    host = machine(ram=10**9)
    found = with_gpu(host, gpu_figures("cpu", 2**31, buffer_bytes=5 * MIB, matrix_size=64))
    assert (found.num_devices, found.level(DEVICE).capacity_bytes) == (1, 2**31)
    assert found.level(DEVICE).processor.launch_s > 0
    assert found.level(DEVICE).processor.seam_s > 0
    assert found.link(RAM, DEVICE).peak_bytes_per_s > 1e6
    assert found.without_device() == host


def test_a_device_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match="cuda:7 cannot be measured: `moeflow doctor` shows why"):
        gpu_figures("cuda:7", 2**30)
