"""A GPU is measured in a process of its own, and once; here the processor, since there is no GPU."""

from __future__ import annotations

import dataclasses
import platform

import msgspec
import pytest

from moeflow.core.errors import ConfigError
from moeflow.core.hardware import DEVICE, RAM
from moeflow.core.units import GIB, MIB
from moeflow.planner.hardware import gpu_figures as module
from moeflow.planner.hardware.gpu_figures import GpuFigures, figures_file, gpu_figures, with_gpu
from moeflow.planner.hardware.host import HostResources
from moeflow.planner.hardware.machine_files import load_machine
from tests.planner.examples import machine

HERE = HostResources(4, 64 * GIB, 32 * GIB, "cuda:0", 4 * GIB, accelerator_identity="card, driver, torch, Triton")
L4 = load_machine("l4")


@pytest.mark.slow  # starts processes
def test_a_device_is_added_to_a_machine(tmp_path):
    host, file = machine(ram=10**9), tmp_path / "gpus" / "one.json"
    found = with_gpu(host, gpu_figures("cpu", 2**31, file, buffer_bytes=5 * MIB, matrix_size=64))
    assert (found.num_devices, found.level(DEVICE).capacity_bytes) == (1, 2**31)
    assert found.level(DEVICE).processor.launch_s > 0
    assert found.level(DEVICE).processor.seam_s > 0
    assert found.link(RAM, DEVICE).peak_bytes_per_s > 1e6
    assert found.without_device() == host
    again = with_gpu(host, gpu_figures("cuda:7", 2**31, file))  # which is not there
    assert again == found


@pytest.mark.slow  # starts processes
def test_a_device_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cuda:7 cannot be measured: Torch not compiled .*\. Use --device cpu"):
        gpu_figures("cuda:7", 2**30, tmp_path / "one.json")
    assert not any(tmp_path.iterdir())


@pytest.fixture
def measured(monkeypatch):
    """The speeds of the card at each measurement."""
    speeds: list[float] = []

    def lines(_, order):
        speeds.append(1e11 * (len(speeds) + 1))
        level = dataclasses.replace(
            L4.level(DEVICE), capacity_bytes=msgspec.json.decode(order)["memory_bytes"], read_bytes_per_s=speeds[-1]
        )
        figures = GpuFigures(level, L4.link(RAM, DEVICE), L4.link(DEVICE, RAM))
        yield msgspec.json.encode({"figures": figures})

    monkeypatch.setattr(module, "run_apart", lines)
    return speeds


def test_a_gpu_is_measured_once_and_again_if_asked(tmp_path, measured):
    file = tmp_path / "gpus" / "one.json"
    first = gpu_figures("cuda:0", 2**30, file)
    later = gpu_figures("cuda:0", 2**31, file)
    assert later == msgspec.structs.replace(first, level=dataclasses.replace(first.level, capacity_bytes=2**31))
    assert measured == [1e11]
    assert gpu_figures("cuda:0", 2**30, file, recalibrate=True).level.read_bytes_per_s == 2e11
    assert gpu_figures("cuda:0", 2**30, file).level.read_bytes_per_s == 2e11


@pytest.mark.parametrize("damage", ["", "{}", "[" * 10**5, '{"level": 1}'])
def test_a_damaged_file_is_made_again(tmp_path, measured, damage):
    file = tmp_path / "one.json"
    gpu_figures("cuda:0", 2**30, file)
    kept = file.read_text()
    for text in (damage, kept.replace('"read_bytes_per_s":100000000000.0', '"read_bytes_per_s":-1')):
        file.write_text(text)
        assert gpu_figures("cuda:0", 2**30, file).level.read_bytes_per_s == measured[-1]
    assert len(measured) == 3


def test_figures_that_cannot_be_kept_are_used(tmp_path, measured):
    (tmp_path / "gpus").touch()
    for number in (1, 2):
        assert gpu_figures("cuda:0", 2**30, tmp_path / "gpus" / "one.json").level.read_bytes_per_s == number * 1e11


def test_figures_are_valid_for_a_card_its_software_and_its_machine(tmp_path, monkeypatch):
    file = figures_file(tmp_path, HERE, "cuda:0")
    assert file == figures_file(tmp_path, dataclasses.replace(HERE, accelerator_free_bytes=1), "cuda:0")
    assert file.is_relative_to(tmp_path)
    other = dataclasses.replace(HERE, accelerator_identity="another driver")
    different = [figures_file(tmp_path, other, "cuda:0"), figures_file(tmp_path, HERE, "cuda:1")]
    monkeypatch.setattr(platform, "node", lambda: "another machine")
    different.append(figures_file(tmp_path, HERE, "cuda:0"))
    assert len({file, *different}) == 4
