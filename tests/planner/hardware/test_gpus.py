"""Another process finds the GPUs; a device setting selects one of them, with its free memory."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from moeflow.planner.hardware import gpus, host
from moeflow.planner.hardware.gpus import Gpu, find_gpus, tried_gpus
from moeflow.planner.hardware.host import host_resources

FOUND = [
    Gpu("cuda:0", free_bytes=3, has_bfloat16=False),
    Gpu("cuda:1", free_bytes=5),
    Gpu("cuda:2", problem="no kernel image"),
]


@pytest.fixture
def three(monkeypatch):
    monkeypatch.setattr(host, "has_gpu_driver", lambda: True)
    monkeypatch.setattr(gpus, "find_gpus", lambda: FOUND)


@pytest.mark.parametrize(
    ("device", "name", "free_bytes", "has_bfloat16"),
    [
        ("auto", "cuda:1", 5, True),
        ("cuda", "cuda:0", 3, False),
        ("cuda:1", "cuda:1", 5, True),
        ("cuda:1:2GiB", "cuda:1", 5, True),
        ("cuda:2GiB", "cuda:0", 3, False),
    ],
)
def test_what_is_free_is_read_of_the_gpu_that_is_asked_for(three, device, name, free_bytes, has_bfloat16):
    here = host_resources(device)
    assert (here.accelerator, here.accelerator_free_bytes, here.has_bfloat16) == (name, free_bytes, has_bfloat16)


@pytest.mark.parametrize(
    ("device", "why"),
    [
        ("cuda:2", "torch cannot compute on cuda:2: no kernel image"),
        ("cuda:3", "torch finds only cuda:0, cuda:1, cuda:2 here"),
    ],
)
def test_a_gpu_that_cannot_compute_is_none(three, device, why):
    here = host_resources(device)
    assert (here.accelerator, here.why_no_accelerator) == (None, why)


def test_where_no_gpu_is_asked_for_none_is_looked_for(monkeypatch):
    monkeypatch.setattr(host, "has_gpu_driver", lambda: True)
    monkeypatch.setattr(gpus, "find_gpus", lambda: pytest.fail("GPUs were looked for"))
    for device in ("cpu", "emulated:1GiB,1"):
        assert host_resources(device).accelerator is None


def test_each_gpu_is_tried(monkeypatch):
    def ones(*_, device):
        if device == "cuda:2":
            raise torch.AcceleratorError("CUDA error: no kernel image is available\nCompile with ...")
        return torch.zeros(2)

    cuda = SimpleNamespace(
        device_count=lambda: 3,
        mem_get_info=lambda name: {"cuda:0": (3, 9), "cuda:1": (5, 9)}[name],
        get_device_capability=lambda name: (7, 5) if name == "cuda:0" else (9, 0),
    )
    fake = SimpleNamespace(ones=ones, cuda=cuda, version=SimpleNamespace(hip=None))
    monkeypatch.setattr(gpus, "torch", fake)
    *usable, broken = tried_gpus()
    assert usable == FOUND[:2]
    assert broken == Gpu("cuda:2", problem="CUDA error: no kernel image is available")


def test_a_process_that_fails_finds_none(monkeypatch):
    monkeypatch.setattr(gpus, "run_apart", lambda *_: iter([b"no JSON\n"]))
    assert find_gpus() == []


@pytest.mark.slow  # starts processes
def test_the_process_that_asks_does_not_even_import_torch():
    code = (
        "import sys\n"
        "from moeflow.planner.hardware import host\n"
        "host.has_gpu_driver = lambda: True\n"
        "print(host.host_resources('auto').accelerator, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    expected = "cuda" if torch.cuda.is_available() else "None"
    assert done.stdout.startswith(expected)
    assert done.stdout.endswith("False\n")
