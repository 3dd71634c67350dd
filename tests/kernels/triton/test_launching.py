"""Kernels start on the GPU of their tensors, even if the thread has another current GPU, and where Triton works."""

import re
from subprocess import CalledProcessError
from types import SimpleNamespace

import pytest
import torch

from moeflow.kernels.triton import launching


@pytest.mark.parametrize("current", [0, 1])
def test_kernels_start_on_the_device_of_their_tensors(monkeypatch, current):
    started, entered = [], []

    class Device:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            entered.append(self.device.index)

        def __exit__(self, *_):
            entered.pop()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device", Device)
    x = SimpleNamespace(device=torch.device("cuda:1"))
    kernel = {(3,): lambda *arguments, **_: started.append((arguments[0], [current, *entered][-1]))}

    launching.launch(kernel, (3,), x, 5, size=2)

    assert started == [(x, 1)]
    assert not entered


@pytest.fixture
def on_gpu():
    launching._runs_kernels.cache_clear()
    yield SimpleNamespace(is_cuda=True, device=torch.device("cuda:1"))
    launching._runs_kernels.cache_clear()


def test_a_gpu_where_triton_works_is_tried_once(monkeypatch, on_gpu):
    tried = []
    monkeypatch.setattr(launching, "why_not", lambda device: tried.append(str(device)) or "")
    assert launching.accepts(on_gpu)
    assert launching.accepts(on_gpu)
    assert tried == ["cuda:1"]


def test_a_gpu_where_triton_fails_is_left_to_torch(monkeypatch, on_gpu, caplog):
    monkeypatch.setattr(launching, "why_not", lambda device: "Failed to find C compiler")
    assert not launching.accepts(on_gpu)
    assert not launching.accepts(on_gpu)
    (record,) = caplog.records
    assert record.message.startswith("cuda:1 computes without Triton's kernels")
    assert record.message.endswith("Failed to find C compiler")


def test_amd_gpus_are_left_to_torch(monkeypatch, on_gpu, caplog):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not launching.accepts(on_gpu)
    assert caplog.records[0].message.endswith("they are for NVIDIA GPUs")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("Failed to find C compiler. Please\nand more"), "Failed to find C compiler. Please; install gcc"),
        (CalledProcessError(1, ["/usr/bin/gcc", "x.c"]), r".* exit status 1\.; install gcc and Python's headers .*"),
        (PermissionError(13, "Permission denied", "/root/.triton"), ".*/root/.triton'; set TRITON_CACHE_DIR to .*"),
        (
            ModuleNotFoundError("No module named 'triton'"),
            r".*triton'; install the torch and Triton .*moeflow\[cuda\].*",
        ),
        (ValueError(), "ValueError; install the torch and Triton that fit together .*"),
    ],
)
def test_an_error_of_a_trial_has_a_remedy(monkeypatch, error, words):
    assert launching.why_not(torch.device("cpu")) == ""

    def fail(*_, **__):
        raise error

    monkeypatch.setattr(launching, "launch", fail)
    assert re.fullmatch(words, launching.why_not(torch.device("cpu")))


def test_wrong_results_are_a_problem(monkeypatch):
    monkeypatch.setattr(launching, "launch", lambda *_, **__: None)
    assert launching.why_not(torch.device("cpu")).startswith("a trial gives wrong results; install")
