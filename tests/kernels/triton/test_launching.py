"""Kernels start on the GPU of their tensors, whichever GPU is the thread's current one."""

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
