"""A played device: never faster than it is said to be, and never faster than what plays it."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeflow.core.hardware import DEVICE, RAM, KernelEfficiency
from moeflow.core.offload_config import EmulatedDeviceConfig, EmulatedSpeeds
from moeflow.planner.emulated_machine import with_emulated_device
from moeflow.planner.model_costs import Work
from moeflow.planner.roofline import work_seconds
from tests.planner.examples import machine


def host_reaching(share, rows=4.0):
    host = machine(ram=10**9)
    ram = host.level(RAM)
    entry = KernelEfficiency(kernel="linear", dtype="bfloat16", rows=rows, share=share, values=1000)
    processor = dataclasses.replace(ram.processor, efficiencies=(entry,))
    levels = tuple(dataclasses.replace(it, processor=processor) if it.name == RAM else it for it in host.levels)
    return dataclasses.replace(host, levels=levels)


def device(**speeds):
    return EmulatedDeviceConfig(capacity_bytes=10**8, speeds=EmulatedSpeeds(link=1e8, **speeds))


@given(
    st.floats(0.05, 1.0), st.floats(1e7, 1e12), st.floats(1e8, 1e13), st.sampled_from([1.0, 4.0, 64.0]), st.booleans()
)
def test_work_takes_the_longer_of_the_said_time_and_the_real_one(share, num_bytes, num_flops, rows, is_host):
    host = host_reaching(share, rows)
    names = ("host_bytes", "host_flops") if is_host else ("device_bytes", "device_flops")
    played = with_emulated_device(host, device(**dict(zip(names, (num_bytes, num_flops), strict=True))))
    work = Work("linear", "bfloat16", 2000.0, 2000.0 * rows, rows, 1000)
    said_s = max(work.num_bytes / num_bytes, work.num_flops / num_flops)
    real_s = work_seconds(host.level(RAM), work)
    assert work_seconds(played.level(RAM if is_host else DEVICE), work) == pytest.approx(max(said_s, real_s))


def test_a_device_as_fast_as_this_machine_has_its_own_memory_and_link():
    host = host_reaching(0.5)
    played = with_emulated_device(host, device())
    assert played.level(DEVICE).processor == host.level(RAM).processor
    assert (played.level(DEVICE).capacity_bytes, played.num_devices) == (10**8, 1)
    assert played.link(RAM, DEVICE).bytes_per_s(1e6) == played.link(DEVICE, RAM).bytes_per_s(1e6) == 1e8
    assert not played.has("disk")
